"""Encode events as records of TensorBoard's plugins; the caller sets the time of each record.

This module imports tensorboard, so `TensorBoardWriter` imports it only when it is constructed. Images and
histograms have the format of `SummaryWriter`, which every version of TensorBoard reads.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c
from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from eventloop.description.plain_values import flat
from eventloop.events import HistogramLogged, ImageLogged, RunInfo, ScalarsLogged, TextLogged
from eventloop.events.outcome import Status
from eventloop.util.surrogates import escaped
from eventloop.writers.pixels import pixels, png, values

__all__ = [
    "Scalars",
    "begin",
    "frame",
    "graph",
    "histogram",
    "hparams",
    "image",
    "restart",
    "run_info",
    "session_end",
    "text",
]

CHUNK = 8192
"""The most histogram values per call of numpy, which then holds the interpreter lock for 4 ms.

A call with 100 000 values holds it for 24 ms.
"""

HParam = bool | int | float | str
"""The types that a hyperparameter may have."""


def begin() -> Any:
    """Return the first record of a file, which has the version of the format."""
    return Record(wall_time=time.time(), file_version="brain.Event:2")


def restart(step: int) -> Any:
    """Return a record that makes readers discard everything at `step` and later."""
    return Record(step=step, session_log=SessionLog(status=SessionLog.START))


class Scalars:
    """Make one record for all scalars of an event.

    A record object is reused for the next event with the same names, because filling it takes a third of the
    time of creating one. So encode a record before the next call of `record`.
    """

    CACHED = 64
    """The most record objects in the cache, one for each list of names."""

    def __init__(self) -> None:
        # by mode and names: the record, and its value objects in the order of the names
        self._cache: dict[tuple[str, ...], tuple[Any, list[Any]]] = {}

    def record(self, event: ScalarsLogged) -> Any:
        """Return the record of an event; it is valid until the next call."""
        scalars = event.scalars
        key = (event.mode, *scalars)
        cached = self._cache.get(key)
        record, values = self._create(key) if cached is None else cached
        record.step = event.step
        for value, number in zip(values, scalars.values(), strict=True):
            value.simple_value = number
        return record

    def _create(self, key: tuple[str, ...]) -> tuple[Any, list[Any]]:
        """Create and cache a record for a mode and names; return it and its value objects."""
        if len(self._cache) >= self.CACHED:
            self._cache.clear()
        record = Record()
        mode, *names = key
        values = [record.summary.value.add(tag=escaped(f"{mode}/{name}")) for name in names]
        self._cache[key] = record, values
        return record, values


def text(event: TextLogged) -> Any:
    """Return the record of a text, which TensorBoard shows as Markdown."""
    return _text(f"{event.mode}/{event.name}", event.text, event.step)


def run_info(event: RunInfo) -> Any:
    """Return the record of the facts and settings of a run, as a Markdown table of keys and values."""
    settings = {f"config.{key}": str(value) for key, value in flat(event.config)}
    settings |= {key: str(value) for key, value in flat(event.options)}
    rows = [f"|{_cell(key)}|{_cell(value)}|" for key, value in [*event.info.items(), *settings.items()]]
    return _text("run_info", "\n".join(["|key|value|", "|---|---|", *rows]), event.step)


def graph(definition: bytes) -> Any:
    """Return the record of a model's graph; `definition` is an encoded GraphDef."""
    return Record(wall_time=time.time(), graph_def=definition)


def image(event: ImageLogged) -> Any:
    """Return the record of an image, encoded as PNG.

    Raises:
        TypeError, ValueError: `eventloop.writers.pixels.pixels` refuses the dtype or the shape.
    """
    array = pixels(event)
    record = Record(step=event.step)
    height, width, channels = array.shape
    value = record.summary.value.add(tag=escaped(f"{event.mode}/{event.name}")).image
    value.height, value.width, value.colorspace = height, width, channels
    value.encoded_image_string = png(array)
    return record


def histogram(event: HistogramLogged, bins: int | str) -> Any:
    """Return a record with the histogram of the finite values of an event.

    If there are values that are not finite, the record also has their number as the scalar `{tag}/nonfinite`.

    Args:
        event: the event.
        bins: the number of bins of equal width, or "tensorflow" for TensorFlow's bins.

    Raises:
        TypeError, ValueError: dtype and shape do not match the bytes, or the values are not numbers.
    """
    array = values(event).ravel().astype(np.float64)
    finite = array[np.isfinite(array)]
    tag = escaped(f"{event.mode}/{event.name}")
    record = Record(step=event.step)
    if finite.size < array.size:
        record.summary.value.add(tag=f"{tag}/nonfinite", simple_value=array.size - finite.size)
    if finite.size:
        counts, edges = _count(finite, bins)
        value = record.summary.value.add(tag=tag).histo
        value.min, value.max, value.num = finite.min(), finite.max(), finite.size
        value.sum, value.sum_squares = finite.sum(), finite @ finite
        value.bucket_limit.extend(edges)
        value.bucket.extend(counts)
    return record


def hparams(chosen: Mapping[str, HParam], metrics: Sequence[str]) -> list[Any]:
    """Return the two records of the HParams tab.

    Args:
        chosen: the settings of the run.
        metrics: the tags of the metrics whose last values the tab compares.
    """
    data_types = {bool: "BOOL", int: "FLOAT64", float: "FLOAT64", str: "STRING"}
    hparam_infos = []
    for name, value in chosen.items():
        data_type = api_pb2.DataType.Value(f"DATA_TYPE_{data_types[type(value)]}")
        hparam_infos.append(api_pb2.HParamInfo(name=escaped(name), type=data_type))
    metric_infos = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=escaped(tag))) for tag in metrics]
    experiment = api_pb2.Experiment(hparam_infos=hparam_infos, metric_infos=metric_infos)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in chosen.items():
        field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(start.hparams[escaped(name)], field, escaped(value) if isinstance(value, str) else value)
    return [
        _hparams_record(metadata.EXPERIMENT_TAG, experiment=experiment),
        _hparams_record(metadata.SESSION_START_INFO_TAG, session_start_info=start),
    ]


def session_end(status: Status, timestamp: float) -> Any:
    """Return the record that shows in the HParams tab whether and when the run ended.

    Args:
        status: how the run ended; "finished" is a success, any other status a failure.
        timestamp: the Unix time of the end.
    """
    status_name = "STATUS_SUCCESS" if status == "finished" else "STATUS_FAILURE"
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value(status_name), end_time_secs=timestamp)
    return _hparams_record(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _hparams_record(tag: str, **data: Any) -> Any:
    """Return a record with `data` for TensorBoard's HParams plugin."""
    record = Record(wall_time=time.time())
    content = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **data)
    value = record.summary.value.add(tag=tag, metadata=metadata.create_summary_metadata(content))
    value.tensor.CopyFrom(metadata.NULL_TENSOR)  # the plugin reads only the metadata
    return record


def _text(tag: str, content: str, step: int) -> Any:
    """Return a record with a text for TensorBoard's text plugin."""
    record = Record(step=step)
    value = record.summary.value.add(tag=escaped(tag))
    value.metadata.plugin_data.plugin_name = "text"
    value.tensor.dtype = DT_STRING
    value.tensor.tensor_shape.dim.add(size=1)
    value.tensor.string_val.append(escaped(content).encode())
    return record


def _cell(content: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return content.replace("|", "\\|").replace("\n", "<br>")


def _count(finite: npt.NDArray[np.float64], bins: int | str) -> tuple[list[int], list[float]]:
    """Return the counts and the right edges of the bins, from the first filled bin to the last.

    An empty bin is put before them, because TensorBoard takes the left edge of a bin from the bin before it.

    Args:
        finite: the values.
        bins: the number of bins, or "tensorflow".
    """
    edges = np.histogram_bin_edges(finite, bins) if isinstance(bins, int) else _exponential_edges()
    clipped = finite.clip(edges[0], edges[-1])  # values outside of all bins count in the first or last bin
    counts = np.zeros(len(edges) - 1, np.int64)
    for start in range(0, len(clipped), CHUNK):
        counts += np.histogram(clipped[start : start + CHUNK], edges)[0]
    filled = np.flatnonzero(counts)
    first_filled, last_filled = int(filled[0]), int(filled[-1])
    filled_counts = counts[first_filled : last_filled + 1].tolist()
    return [0, *filled_counts], edges[first_filled : last_filled + 2].tolist()


@cache
def _exponential_edges() -> npt.NDArray[np.float64]:
    """Return the edges of TensorFlow's bins: from 1e-12 to 1e20 by factors of 1.1, on both sides of 0."""
    count = int(np.ceil(np.log(1e32) / np.log(1.1)))
    positive = 1e-12 * 1.1 ** np.arange(count)
    return np.concatenate([-positive[::-1], [0.0], positive])


def frame(data: bytes) -> bytes:
    """Return an encoded record as in a file: length, checksum of the length, data, checksum of the data.

    The checksum is CRC-32C from a C library: less than 1 us for the 244 bytes of ten scalars, and 0.1 ms for
    an image of 512 x 512. TensorBoard's own is a Python loop that takes 45 us and 209 ms.
    """
    return b"".join((_header(len(data)), data, _checksum(data)))


@lru_cache(maxsize=256)  # records of one kind mostly have the same length
def _header(length: int) -> bytes:
    """Return the little-endian length and its checksum."""
    packed = struct.pack("<Q", length)
    return packed + _checksum(packed)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C of `data`, little-endian and masked as in TensorFlow's `record_writer.cc`.

    The mask is part of the format: without it the checksum of data that contains checksums would be weak.
    """
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
