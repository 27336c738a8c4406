"""Write a run's events to files, servers and the console, with one destination per module.

Start reading at `writer.py`: `Writer` is the base class; `jsonl.py` is a short example of a subclass. A
module imports its library in the constructor of its writer. This package may import any package below the
trainer (`eventlog`, `events`, `bus`, `background`, `util`), and never imports `eventloop.hooks`.
"""

from typing import TYPE_CHECKING, NoReturn

from eventloop.migration.names import explain_absent
from eventloop.writers.console import ConsoleWriter
from eventloop.writers.csv_writer import CSVWriter
from eventloop.writers.event_log_writer import EventLogWriter
from eventloop.writers.image_files import ImageFileWriter
from eventloop.writers.jsonl import JSONLWriter, read_jsonl
from eventloop.writers.mlflow_writer import MLflowWriter
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


if not TYPE_CHECKING:  # a type checker must see that there are no other names

    def __getattr__(name: str) -> NoReturn:
        explain_absent(__name__, name)
