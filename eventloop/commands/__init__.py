"""Send commands to a running training, as files in its directory, and receive them there.

Start with `messages`, which defines a command and its answer, files in `inbox/` and `outbox/`. `client` sends
a command and waits for its answer, the run receives commands with `inbox`, and `record` reads and writes
`commands.jsonl`, the file of applied commands. `eventloop.steering` applies commands to a trainer. This
package imports `ownership`, `temporary` and `util`, and no torch. Its public names are imported at their
first use, because a run needs no client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventloop.commands.client import NoAnswerError as NoAnswerError
    from eventloop.commands.client import NoRunError as NoRunError
    from eventloop.commands.client import send as send
    from eventloop.commands.messages import Answer as Answer

_MODULES = {"Answer": "messages", "NoAnswerError": "client", "NoRunError": "client", "send": "client"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"eventloop.commands.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'eventloop.commands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
