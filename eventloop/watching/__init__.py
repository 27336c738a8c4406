"""Read the directory of a run again and again, while the run is under way or after its end.

Start with `RunReader`, which returns a `RunView`: the state of the run, as `eventloop watch --json` prints
it. `view` defines the fields of a `RunView`. `liveness` decides whether the run is alive. `curves`, `rows`
and `logged` read the new part of the run's log files. `files` lists the run's checkpoints and reads
`costs.json`, the times of the phases and handlers of its iterations. The package `web` serves the live page.
The package may import `reporting`, `ownership`, `checkpoint`, `eventlog` and the packages below them. It
imports no torch.
"""

from __future__ import annotations

from eventloop.watching.reader import RunReader as RunReader
from eventloop.watching.view import CheckpointView as CheckpointView
from eventloop.watching.view import CurveView as CurveView
from eventloop.watching.view import HandlerView as HandlerView
from eventloop.watching.view import Notice as Notice
from eventloop.watching.view import PhaseView as PhaseView
from eventloop.watching.view import QueueView as QueueView
from eventloop.watching.view import RunView as RunView
