"""Publish parts of a checkpoint, such as its weights, as a file with a hash in its name.

`CheckpointHook` uses it at the end of a training, for `published_keys`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from eventloop._version import __version__
from eventloop.checkpoint.disk import DISK, Sink, write_file
from eventloop.checkpoint.saving.safetensors_file import check_flat, encode, require_safetensors, shared_names
from eventloop.checkpoint.store import load_checkpoint
from eventloop.checkpoint.weights import unwrap
from eventloop.state.keys import NEEDED
from eventloop.temporary.names import temporary_path
from eventloop.util.checks import check_choice, strings
from eventloop.util.errors import CheckpointError

PublishedFormat = Literal["pth", "safetensors"]

logger = logging.getLogger("eventloop")


class Publisher:
    """Write parts of a checkpoint next to it, as files named `<name>-<hash>.pth` or `.safetensors`.

    The hash is the first eight digits of the file's SHA-256, as in torch.hub's names, so that
    `load_state_dict_from_url(check_hash=True)` checks it. A key that the checkpoint lacks is logged and left
    out. A safetensors file holds one key, with its tensors by name. Tied tensors are written once, as
    `safetensors.torch.save_model` does.

    Args:
        keys: the keys of the checkpoint to publish; None publishes nothing.
        file_format: "pth" or "safetensors".

    Raises:
        TypeError: `keys` is not a string or a list of strings.
        ValueError: `keys` is empty or has a key twice, the format is unknown, or safetensors cannot hold the
            keys.
        ImportError: the format is safetensors, which is not installed.
    """

    def __init__(self, keys: str | Sequence[str] | None, file_format: PublishedFormat) -> None:
        check_choice("published_format", file_format, get_args(PublishedFormat))
        self._keys, self._format = strings("published_keys", keys), file_format
        if file_format == "safetensors":
            if len(self._keys) != 1 or self._keys[0] in NEEDED:
                raise ValueError(
                    "published_format='safetensors' holds the tensors of one key, expected "
                    f"published_keys='state_dict' for the weights, got published_keys={keys!r}"
                )
            require_safetensors()

    def __bool__(self) -> bool:
        """Return whether there is a key to publish."""
        return bool(self._keys)

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model whose weights could not be published, before it is trained.

        Raises:
            ValueError: the format is safetensors, which cannot hold the model's state_dict.
        """
        if self._format != "safetensors" or self._keys != ["state_dict"]:
            return
        try:
            state = unwrap(model).state_dict()
            check_flat(state, "the model's state_dict")
            shared_names(state, "the model's state_dict")
        except CheckpointError as error:
            raise ValueError(str(error)) from None

    def publish_all(self, paths: Iterable[Path], model: torch.nn.Module) -> None:
        """Publish each checkpoint, and log the path of each published file."""
        for path in paths:
            if (published := self.publish(path, model)) is not None:
                logger.info("published %s", published)

    def publish(self, path: Path, model: torch.nn.Module) -> Path | None:
        """Publish a checkpoint, and return the path of the published file.

        None is returned if the format is safetensors and the checkpoint lacks the key.

        Args:
            path: the checkpoint.
            model: the trained model, which shows which tensors are tied; a checkpoint does not.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            CheckpointError: the checkpoint cannot be read, or the format cannot hold its tensors.
            OSError: the file cannot be written.
        """
        checkpoint = load_checkpoint(path)
        missing = [key for key in self._keys if key not in checkpoint]
        if missing:
            logger.warning(
                "%s has no %s to publish: it has %s", path, ", ".join(missing), ", ".join(checkpoint)
            )
        if self._format == "pth":
            parts = {key: checkpoint[key] for key in self._keys if key in checkpoint}
            return write_beside(path, "pth", lambda sink: torch.save(parts, sink))  # type: ignore[arg-type]
        if missing:
            return None
        source = f"{path}, its {self._keys[0]},"
        check_flat(checkpoint[self._keys[0]], source)
        # the model shows which of its weights are tied; for another key it is not known
        model_state = unwrap(model).state_dict() if self._keys == ["state_dict"] else {}
        shared = shared_names(model_state, source)
        pieces = encode(checkpoint[self._keys[0]], shared, origin_of(checkpoint))
        return write_beside(path, "safetensors", lambda sink: [sink.write(piece) for piece in pieces])


def origin_of(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file of weights: the checkpoint's iteration and epoch, and our version."""
    meta = checkpoint.get("meta", {})
    return {**{key: str(meta.get(key, "")) for key in ("iter", "epoch")}, "eventloop": __version__}


def write_beside(path: Path, suffix: str, write: Callable[[Sink], object]) -> Path:
    """Write a file durably in the folder of a checkpoint, under a name with its hash; return its path.

    After an error no file is left.

    Args:
        path: the checkpoint, whose name the file's name begins with.
        suffix: the suffix of the file, without the dot.
        write: writes the contents to the sink that it is given.

    Raises:
        OSError: the file cannot be written.
    """
    work = temporary_path(path, "tmp")
    try:
        entry = write_file(work, write)
        name = path.name if path.is_dir() else path.stem
        target = path.with_name(f"{name}-{entry.sha256[:8]}.{suffix}")
        DISK.rename(work, target)
    except BaseException:
        work.unlink(missing_ok=True)
        raise
    DISK.sync_directory(target.parent)
    return target
