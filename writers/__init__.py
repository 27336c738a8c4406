"""Writers: background subscribers that put a run's facts somewhere. One destination a file."""

from eventloop.writers.console import ConsoleWriter
from eventloop.writers.jsonl import JSONLWriter, read_jsonl
from eventloop.writers.tensorboard import TensorBoardWriter
from eventloop.writers.writer import Writer

__all__ = ["ConsoleWriter", "JSONLWriter", "TensorBoardWriter", "Writer", "read_jsonl"]
