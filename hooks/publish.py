"""Publishing a checkpoint: what others need of it, under a name that says what is in it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from eventloop.checkpoint import load_checkpoint, save_checkpoint

logger = logging.getLogger("eventloop")


def publish(path: Path, keys: Sequence[str]) -> Path:
    """Write the named parts of a checkpoint beside it, as `<name>-<hash>.pth`, and return that path. The hash is the
    first eight digits of the file's SHA-256, as in torch.hub's names: `load_state_dict_from_url(check_hash=True)`
    checks it. A part that the checkpoint does not have is named and left out.

    Raises:
        FileNotFoundError, CheckpointError: the checkpoint cannot be read.
        OSError: the file cannot be written.
    """
    checkpoint = load_checkpoint(path)
    missing = [key for key in keys if key not in checkpoint]
    if missing:
        logger.warning("%s has no %s to publish: it has %s", path, ", ".join(missing), ", ".join(checkpoint))
    written = path.with_name(f"{path.stem}-published{path.suffix}")
    save_checkpoint({key: checkpoint[key] for key in keys if key in checkpoint}, written)
    with open(written, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:8]
    return written.replace(path.with_name(f"{path.stem}-{digest}{path.suffix}"))
