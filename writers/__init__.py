"""Write a run's events to files, servers and the console, with one destination per module.

Start reading at `writer.py`: `Writer` is the base class. `jsonl.py` is a short example of a subclass. The
module of a writer is imported when the writer is first used, and a third-party library when a writer that
needs it is constructed. This package may import any package below the trainer (`eventlog`, `events`, `bus`,
`background`, `util`), and never imports `eventloop.hooks`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from eventloop.migration.names import explain_absent

if TYPE_CHECKING:
    from eventloop.writers.console import ConsoleWriter
    from eventloop.writers.csv_writer import CSVWriter
    from eventloop.writers.event_log_writer import EventLogWriter
    from eventloop.writers.image_files import ImageFileWriter
    from eventloop.writers.jsonl import JSONLWriter, read_jsonl
    from eventloop.writers.mlflow_writer import MLflowWriter
    from eventloop.writers.notify_writer import NotifyWriter
    from eventloop.writers.opentelemetry_writer import OpenTelemetryWriter
    from eventloop.writers.tensorboard import TensorBoardWriter
    from eventloop.writers.tensorboard_graph import trace_graph
    from eventloop.writers.trackio_writer import TrackioWriter
    from eventloop.writers.visdom_writer import VisdomWriter
    from eventloop.writers.wandb_writer import WandbWriter
    from eventloop.writers.writer import TimedWriter, Writer

__all__ = [
    "CSVWriter",
    "ConsoleWriter",
    "EventLogWriter",
    "ImageFileWriter",
    "JSONLWriter",
    "MLflowWriter",
    "NotifyWriter",
    "OpenTelemetryWriter",
    "TensorBoardWriter",
    "TimedWriter",
    "TrackioWriter",
    "VisdomWriter",
    "WandbWriter",
    "Writer",
    "read_jsonl",
    "trace_graph",
]

_ON_FIRST_USE = {
    "CSVWriter": "csv_writer",
    "ConsoleWriter": "console",
    "EventLogWriter": "event_log_writer",
    "ImageFileWriter": "image_files",
    "JSONLWriter": "jsonl",
    "MLflowWriter": "mlflow_writer",
    "NotifyWriter": "notify_writer",
    "OpenTelemetryWriter": "opentelemetry_writer",
    "TensorBoardWriter": "tensorboard",
    "TimedWriter": "writer",
    "TrackioWriter": "trackio_writer",
    "VisdomWriter": "visdom_writer",
    "WandbWriter": "wandb_writer",
    "Writer": "writer",
    "read_jsonl": "jsonl",
    "trace_graph": "tensorboard_graph",
}
"""The module that defines each exported name."""

if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in _ON_FIRST_USE:
            return getattr(importlib.import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
        explain_absent(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
