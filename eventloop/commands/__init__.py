"""Send commands to a running training, as files in its directory: `inbox/`, `outbox/`, `commands.jsonl`.

Start with `messages`, which defines a command and its answer. `client` sends a command and waits for its
answer, the run receives commands with `inbox`, and `record` reads and writes the file of applied commands.
`eventloop.steering` applies commands to a trainer. This package imports `ownership`, `temporary` and `util`,
and no torch.
"""

from __future__ import annotations

from eventloop.commands.client import NoAnswerError as NoAnswerError
from eventloop.commands.client import NoRunError as NoRunError
from eventloop.commands.client import send as send
from eventloop.commands.messages import Answer as Answer
