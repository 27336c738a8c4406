"""Store checkpoints so that a crash at any moment leaves a complete one.

Start with `store`, which reads checkpoints and writes one at once, and with `saving`, by which a training
copies and writes its state in the background. `sharded` does so on several ranks together, and `retention`
decides which checkpoints stay. `manifest` describes a checkpoint, `directory` finds the newest and the best,
and `listing` describes a directory for people.
The package may import `data`, `optim`, `metrics`, `state` and the packages below them. Public names are
imported when they are first used, because some need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventloop.checkpoint.directory import find_checkpoints as find_checkpoints
    from eventloop.checkpoint.manifest import read_manifest as read_manifest
    from eventloop.checkpoint.manifest import verify_checkpoint as verify_checkpoint
    from eventloop.checkpoint.sharded.load import load_sharded as load_sharded
    from eventloop.checkpoint.store import latest_checkpoint as latest_checkpoint
    from eventloop.checkpoint.store import load_best as load_best
    from eventloop.checkpoint.store import load_checkpoint as load_checkpoint
    from eventloop.checkpoint.store import load_newest as load_newest
    from eventloop.checkpoint.store import save_checkpoint as save_checkpoint
    from eventloop.util.errors import CheckpointError as CheckpointError

_MODULES = {
    "CheckpointError": "manifest",
    "find_checkpoints": "directory",
    "latest_checkpoint": "store",
    "load_best": "store",
    "load_checkpoint": "store",
    "load_newest": "store",
    "load_sharded": "sharded.load",
    "save_checkpoint": "store",
    "verify_checkpoint": "manifest",
    "read_manifest": "manifest",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"eventloop.checkpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'eventloop.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
