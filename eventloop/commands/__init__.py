"""Commands to a running training, as files in its directory: `inbox/`, `outbox/` and `commands.jsonl`.

Start with `messages`, which says what a command and its answer are. `client` sends a command and waits for
its answer, `inbox` is the side of the run, and `record` the file of applied commands. `eventloop.steering`
applies commands to a trainer. The package imports `ownership`, `temporary` and `util`, and no torch.
"""

from __future__ import annotations

from eventloop.commands.client import NoAnswerError as NoAnswerError
from eventloop.commands.client import NoRunError as NoRunError
from eventloop.commands.client import send as send
from eventloop.commands.messages import Answer as Answer
