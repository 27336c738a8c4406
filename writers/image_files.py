"""Write each logged image as a PNG file in a folder; `eventloop.writers.pixels` encodes the images."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from eventloop.events import Event, ImageLogged
from eventloop.events.run import Run
from eventloop.util.append_file import replacing
from eventloop.util.checks import check_path
from eventloop.util.file_names import safe_name
from eventloop.writers.writer import Writer


class ImageFileWriter(Writer):
    """Write each `image_logged` event to `<work_dir>/images/{mode}/{name}/{step}.png`.

        Trainer(..., hooks=[VisualizationHook(interval=50)], writers=[ImageFileWriter()],
        work_dir="runs/digits")

    A "/" in a name makes subfolders; a name or mode cannot lead out of the folder. Characters that some file
    systems refuse are escaped as in a URL (`%3A` for ":"). A path component of more than 128 bytes is cut and
    ends in a hash. The second image with the same name and step is written to `{step}_1.png`, the third to
    `{step}_2.png`. A resumed run overwrites the images of the steps that it repeats. A file is complete as
    soon as it exists.

    Args:
        folder: the folder's path, relative to the run's work_dir or absolute.
        name: the writer's name in reports; needed if a bus has two writers of this class.

    Raises:
        TypeError: `folder` is not a path.
    """

    events = (ImageLogged,)

    def __init__(self, folder: str | PathLike[str] = "images", *, name: str | None = None) -> None:
        check_path("folder", folder)
        self.folder = folder
        self.name = name
        import eventloop.writers.pixels as pixels  # imports numpy

        self._pixels = pixels
        # by mode and name: the last step, and how many images of that step are written
        self._written: dict[tuple[str, str], tuple[int, int]] = {}

    def open(self, run: Run) -> None:
        self._root = Path(run.work_dir, self.folder)
        self._root.mkdir(parents=True, exist_ok=True)
        self._written = {}

    def write(self, event: Event) -> None:
        """Write the image by way of a temporary file, so that no viewer reads a part of it."""
        assert isinstance(event, ImageLogged)
        data = self._pixels.png(self._pixels.pixels(event))
        path = self._path(event)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as file:
            file.write(data)

    def _path(self, event: ImageLogged) -> Path:
        """Return the path of the file for an image, and count the image."""
        key = (event.mode, event.name)
        last_step, count = self._written.get(key, (event.step, 0))
        if last_step != event.step:
            count = 0
        self._written[key] = (event.step, count + 1)
        file = f"{event.step}_{count}.png" if count else f"{event.step}.png"
        return self._root.joinpath(*map(safe_name, (event.mode, *event.name.split("/"), file)))
