"""TensorBoardWriter: images, histograms, hyperparameters and graphs, as TensorBoard's own reader finds them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from torch.utils.tensorboard.summary import make_histogram
from torch.utils.tensorboard.writer import SummaryWriter

from eventloop.events import AfterRun, Event, HistogramLogged, ImageLogged, ScalarsLogged
from eventloop.writers import TensorBoardWriter, trace_graph
from tests.writers.conftest import Account, Attach, train, write
from tests.writers.conftest import tensorboard as read

Array = npt.NDArray[Any]


def image(array: Array, step: int = 1) -> ImageLogged:
    return ImageLogged(name="cat", step=step, data=array.tobytes(), shape=array.shape, dtype=str(array.dtype))


def histogram(array: Array, step: int = 1) -> HistogramLogged:
    return HistogramLogged(
        name="weight", step=step, data=array.tobytes(), shape=array.shape, dtype=str(array.dtype)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tensorboard"


# --- images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_come_back(attach: Attach, folder: Path, channels: int) -> None:
    """Each is a PNG with every pixel, under its mode and name, at its step."""
    arrays = [
        np.random.default_rng(step).integers(0, 256, (6, 4, channels), dtype=np.uint8) for step in range(3)
    ]

    write(attach(TensorBoardWriter()), *(image(array, step) for step, array in enumerate(arrays)))

    found = read(folder).Images("train/cat")
    assert [(entry.step, entry.height, entry.width) for entry in found] == [(step, 6, 4) for step in range(3)]
    for entry, array in zip(found, arrays, strict=True):
        with Image.open(io.BytesIO(entry.encoded_image_string)) as decoded:
            assert (np.asarray(decoded) == array.squeeze()).all()


def test_what_is_no_image_is_named(attach: Attach, account: Account, folder: Path) -> None:
    """The account says which image and why; the other events of its batch are written."""
    bus = attach(TensorBoardWriter())
    good = np.zeros((2, 2, 3), np.uint8)

    write(bus, image(good, 1), image(np.zeros((3, 8, 8), np.float32), 2), image(good, 3))

    assert "image 'cat' must have the shape (height, width, channels)" in account(bus).error
    assert (account(bus).delivered, account(bus).failed) == (2, 1)
    assert [found.step for found in read(folder).Images("train/cat")] == [1, 3]


def test_own_write_of_a_subclass_is_called(attach: Attach, account: Account, folder: Path) -> None:
    """Also with the events of a batch, of which a bad one costs itself alone."""
    seen: list[Event] = []

    class Mine(TensorBoardWriter):
        def write(self, event: Event) -> None:
            seen.append(event)
            super().write(event)

    events = [
        image(np.zeros((2, 2, channels), np.uint8), step) for step, channels in ((1, 3), (2, 9), (3, 3))
    ]
    bus = attach(Mine())
    write(bus, *events)

    assert seen == events
    assert (account(bus).delivered, account(bus).failed) == (2, 1)
    assert [found.step for found in read(folder).Images("train/cat")] == [1, 3]


# --- histograms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.random.default_rng(0).normal(size=(100, 50)).astype(np.float32),
        np.zeros(7, np.float64),
        np.array([-3.0, 1e-9, 2.5e3], np.float16),
        np.arange(-5, 6),
        np.array([True, False, True]),
    ],
)
def test_histograms_are_those_of_summary_writer(
    attach: Attach, folder: Path, tmp_path: Path, array: Array
) -> None:
    """Bins, counts and moments are what PyTorch's own writer counts in the same values."""
    bins = SummaryWriter(tmp_path / "theirs").default_bins
    theirs = make_histogram(array.astype(np.float64), np.array(bins))

    write(attach(TensorBoardWriter()), histogram(array, step=9))

    (found,) = read(folder).Histograms("train/weight")
    ours = found.histogram_value
    assert found.step == 9
    assert (ours.min, ours.max, ours.num) == (theirs.min, theirs.max, array.size)
    assert (ours.sum, ours.sum_squares) == pytest.approx((theirs.sum, theirs.sum_squares))
    assert list(ours.bucket) == list(theirs.bucket)
    assert list(ours.bucket_limit) == pytest.approx(list(theirs.bucket_limit))


def test_the_number_of_bins_can_be_chosen(attach: Attach, folder: Path) -> None:
    """They are then as wide as each other, from the least value to the greatest."""
    write(attach(TensorBoardWriter(bins=4)), histogram(np.array([0.0, 1.0, 1.5, 4.0])))

    (found,) = read(folder).Histograms("train/weight")
    assert list(found.histogram_value.bucket) == [0, 1, 2, 0, 1]
    assert list(found.histogram_value.bucket_limit) == [0, 1, 2, 3, 4]


def test_what_is_not_finite_is_counted(attach: Attach, folder: Path) -> None:
    """The number of diverged weights is a curve, and the others still have their histogram; an empty one is no error."""
    diverged = np.array([1.0, np.nan, 2.0, np.inf, -np.inf])

    write(
        attach(TensorBoardWriter()),
        histogram(np.ones(5)),
        histogram(diverged, 2),
        histogram(np.full(5, np.nan), 3),
        histogram(np.zeros(0), 4),
    )

    reader = read(folder)
    assert [(h.step, h.histogram_value.num) for h in reader.Histograms("train/weight")] == [(1, 5), (2, 2)]
    assert [(s.step, s.value) for s in reader.Scalars("train/weight/nonfinite")] == [(2, 3), (3, 5)]


def test_values_beyond_all_bins_are_counted(attach: Attach, folder: Path) -> None:
    """In the outermost ones; no value is left out."""
    write(attach(TensorBoardWriter()), histogram(np.array([1e30, -1e30, 0.0])))

    (found,) = read(folder).Histograms("train/weight")
    assert sum(found.histogram_value.bucket) == 3
    assert (found.histogram_value.min, found.histogram_value.max) == (-1e30, 1e30)


# --- resuming ----------------------------------------------------------------------------------------------


def test_an_evaluation_of_an_older_checkpoint_takes_nothing_away(attach: Attach, folder: Path) -> None:
    """Only training makes TensorBoard forget."""
    write(attach(TensorBoardWriter()), *train(10, 20, 30))

    test = ScalarsLogged(mode="test", step=20, scalars={"acc": 1.0})
    write(attach(TensorBoardWriter(), start_iter=20), test)

    assert [point.step for point in read(folder).Scalars("train/loss")] == [10, 20, 30]


# --- hyperparameters ---------------------------------------------------------------------------------------


def content(folder: Path, tag: str) -> Any:
    plugin = read(folder).SummaryMetadata(tag).plugin_data
    assert plugin.plugin_name == metadata.PLUGIN_NAME
    return plugin_data_pb2.HParamsPluginData.FromString(plugin.content)


def test_hparams_are_found_with_their_types(attach: Attach, folder: Path) -> None:
    """A bool is a bool, a text a text, and numbers are numbers; the experiment lists them, and the tags to compare."""
    chosen: dict[str, bool | int | float | str] = {
        "lr": 0.5,
        "layers": 18,
        "nesterov": True,
        "optimizer": "SGD",
    }

    write(attach(TensorBoardWriter(hparams=chosen, metrics=["val/accuracy"])), ScalarsLogged(step=1))

    values = content(folder, metadata.SESSION_START_INFO_TAG).session_start_info.hparams
    assert (values["lr"].number_value, values["layers"].number_value) == (0.5, 18)
    assert (values["nesterov"].bool_value, values["optimizer"].string_value) == (True, "SGD")
    experiment = content(folder, metadata.EXPERIMENT_TAG).experiment
    assert [info.name for info in experiment.hparam_infos] == [*chosen]
    assert [info.name.tag for info in experiment.metric_infos] == ["val/accuracy"]


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([AfterRun()], "SUCCESS"),
        ([AfterRun(error="ValueError: no")], "FAILURE"),
        ([AfterRun(reason="preempted by SIGTERM", signal="SIGTERM")], "FAILURE"),
    ],
)
def test_hparams_say_how_the_run_ended(
    attach: Attach, folder: Path, tmp_path: Path, events: list[Event], status: str
) -> None:
    """A run that failed or was killed is marked in the table; one without hyperparameters is not in it."""
    write(attach(TensorBoardWriter(tmp_path / "without")), *events)
    assert metadata.SESSION_END_INFO_TAG not in read(tmp_path / "without").summary_metadata

    write(attach(TensorBoardWriter(hparams={"lr": 0.5})), *events)

    end = content(folder, metadata.SESSION_END_INFO_TAG).session_end_info
    assert api_pb2.Status.Name(end.status) == f"STATUS_{status}"


# --- graphs ------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.frozen = torch.nn.Dropout().eval()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.frozen(self.norm(x)))
        return result


def test_the_graph_is_found(attach: Attach, folder: Path) -> None:
    """Every module of the model is a part of it."""
    write(attach(TensorBoardWriter(graph=trace_graph(Net(), torch.zeros(1, 3)))), ScalarsLogged(step=1))

    names = " ".join(node.name for node in read(folder).Graph().node)
    assert all(part in names for part in ("Net/BatchNorm1d[norm]", "Net/Linear[head]"))


def test_tracing_changes_nothing() -> None:
    """Modes, statistics and random state are afterwards what they were, so training takes the same course."""
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()

    trace_graph(model, torch.ones(4, 3))

    assert [model.training, model.norm.training, model.frozen.training] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hparams": {"lr": [0.1]}}, TypeError, r"bool, int, float or str, .* got 'lr': \[0\.1\]"),
        ({"hparams": [("lr", 0.1)]}, TypeError, "hparams must be a mapping of names to values, got"),
        (
            {"hparams": {"lr": 1}, "metrics": "loss"},
            TypeError,
            "metrics must be a list of tags .*, got 'loss'",
        ),
        ({"hparams": {"lr": 1}, "metrics": 5}, TypeError, "metrics must be a list of tags .*, got 5"),
        (
            {"metrics": ["val/loss"]},
            ValueError,
            "metrics needs hparams, got .* and no hparams: pass hparams=",
        ),
        ({"graph": Net()}, TypeError, r"the bytes that trace_graph\(model, inputs\) returns, got Net"),
        ({"bins": 0}, ValueError, "bins must be 'tensorflow' or a positive int, got 0"),
        ({"bins": "auto"}, ValueError, "bins must be 'tensorflow' or a positive int, got 'auto'"),
        ({"offload": "gpu"}, ValueError, "offload must be 'auto' or 'thread' or 'process', got 'gpu'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """At the line that wrote them."""
    with pytest.raises(error, match=message):
        TensorBoardWriter(**options)


def test_trace_graph_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorboard there is no format to write a graph in."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard._pytorch_graph", None)

    with pytest.raises(ImportError, match=r"trace_graph needs tensorboard: pip install"):
        trace_graph(Net(), torch.zeros(1, 3))
