"""Make the pictures of the live page: python docs/_generate/watch_pictures.py RUN...

The page of the runs is opened in the installed chromium, best while they train, as `docs/pictures/watch.png` (a desk,
light) and `watch_phone.png` (a telephone, dark). It needs the extra `test`.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

TARGET = Path(__file__).resolve().parents[1] / "pictures"
PICTURES: dict[str, tuple[int, int, Literal["light", "dark"]]] = {
    "watch.png": (1280, 1180, "light"),
    "watch_phone.png": (390, 1000, "dark"),
}
"""The width, the height and the colours of each picture."""
SETTLED_MS = 3000
"""Milliseconds for which a page is left to draw."""


def main(runs: list[str]) -> None:
    """Make all pictures of some runs."""
    server = subprocess.Popen(
        [sys.executable, "-m", "eventloop", "watch", *runs, "--web"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    TARGET.mkdir(exist_ok=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            for name in PICTURES:
                _picture(browser, url, name)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def _picture(browser: Browser, url: str, name: str) -> None:
    width, height, scheme = PICTURES[name]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(url)
    page.wait_for_selector(".main-svg")
    page.wait_for_timeout(SETTLED_MS)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(TARGET / name, optimize=True)
    page.close()


if __name__ == "__main__":
    main(sys.argv[1:])
