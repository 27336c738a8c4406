"""CheckpointHook(published_format="safetensors"), read back with safetensors' own loader."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model

from eventloop import Trainer, __version__
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.checkpoint.disk import Disk
from eventloop.checkpoint.saving.safetensors_file import encode
from eventloop.hooks import CheckpointHook, EMAHook

Make = Callable[..., Trainer]


@pytest.fixture
def publish(make_trainer: Make) -> Callable[..., Path]:
    """Train two epochs and return the one file that was published."""

    def run(model: torch.nn.Module | None = None, *hooks: Any, **options: Any) -> Path:
        hook = CheckpointHook(
            **{"published_keys": "state_dict", "published_format": "safetensors", **options}
        )
        trainer = make_trainer(max_epochs=2, hooks=[*hooks, hook], model=model)
        trainer.train()
        (path,) = trainer.work_dir.glob("*.safetensors")
        return path

    return run


def metadata(path: Path) -> dict[str, str]:
    """What a file says of itself."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def weights(directory: Path) -> dict[str, Any]:
    """Those of the checkpoint it was made of."""
    return dict(load_checkpoint(directory / "epoch_2")["state_dict"])


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """The same names, types and bits."""
    return some.keys() == others.keys() and all(
        value.dtype == others[name].dtype and torch.equal(value, others[name]) for name, value in some.items()
    )


def test_the_weights_are_those_of_the_checkpoint(publish: Callable[..., Path]) -> None:
    """Bit for bit, a BatchNorm's counter among them; the name has the file's hash, and the metadata says where it is
    from, in texts."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    path = publish(model)

    assert equal(load_file(path), weights(path.parent))
    assert load_file(path)["1.num_batches_tracked"].item() == 8
    assert path.name == f"epoch_2-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.safetensors"
    assert metadata(path) == {"format": "pt", "iter": "8", "epoch": "2", "eventloop": __version__}


def test_views_are_published_as_what_they_show(publish: Callable[..., Path]) -> None:
    """The bytes of a conjugate or a negative view are those of what it is a view of."""
    model = torch.nn.Linear(2, 1)
    model.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 4j]).conj())
    model.register_buffer("negative", torch.tensor([1 + 2j, 3 - 4j]).conj().imag)

    published = load_file(publish(model))

    assert published["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert published["negative"].tolist() == [-2.0, 4.0]


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    """Though the library writes the metadata in another order each time, a file that is published again has its name."""
    said = {"iter": "1", "epoch": "2", "line\n": 'in "quotes"', "größe": "\x1f\x7f", "last": "\\"}
    made = {b"".join(encode({"w": torch.arange(3.0)}, {}, said)) for _ in range(20)}
    (tmp_path / "w.safetensors").write_bytes(next(iter(made)))

    assert len(made) == 1
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", **said}
        assert file.get_tensor("w").tolist() == [0.0, 1.0, 2.0]


def test_the_best_is_published_too(make_trainer: Make, scripted: Callable[..., dict[str, Any]]) -> None:
    """As with .pth, which is not written then."""
    hook = CheckpointHook(save_best="acc", published_keys=["state_dict"], published_format="safetensors")
    trainer = make_trainer(max_epochs=3, hooks=[hook], **scripted(0.25, 0.75, 0.5))
    trainer.train()

    made = sorted(trainer.work_dir.glob("*-*"))
    assert [path.name.rsplit("-")[0] for path in made] == ["best_acc_epoch_2", "epoch_3"]
    assert [metadata(path)["epoch"] for path in made] == ["2", "3"]


class Averages(EMAHook):
    """Adds something to the checkpoint, of which the average is `state_dict`."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self._parts = parts

    def before_save_checkpoint(self, trainer: Trainer, event: Any) -> None:
        super().before_save_checkpoint(trainer, event)
        assert trainer.checkpoint is not None
        trainer.checkpoint.update(self._parts)


def test_an_average_is_published_by_the_models_names(publish: Callable[..., Path]) -> None:
    """With an EMAHook the checkpoint's `state_dict` is the average, and so is the file."""
    path = publish(None, Averages())

    assert load_file(path).keys() == {"weight", "bias"}
    assert equal(load_file(path), weights(path.parent))


class Tied(torch.nn.Module):
    """The output layer's weight is the input layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Linear(2, 2)
        self.input = torch.nn.Linear(2, 2)
        self.output.weight = self.input.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.input(x)).sum(1, keepdim=True)


def test_tied_weights_are_written_once(publish: Callable[..., Path], tmp_path: Path) -> None:
    """Under the name that `save_model` keeps, the other one in the metadata; `load_model` reads it."""
    model = Tied()
    path = publish(model)
    save_model(model, str(tmp_path / "theirs.safetensors"))

    assert metadata(path)["output.weight"] == "input.weight"
    assert equal(load_file(path), load_file(tmp_path / "theirs.safetensors"))
    other = Tied()
    missing, unexpected = load_model(other, path)
    assert not missing
    assert not unexpected
    assert equal(other.state_dict(), model.state_dict())


class Overlapping(torch.nn.Linear):
    """A buffer that is a part of the weight."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("first", self.weight.data[:, :1])


class Extra(torch.nn.Linear):
    """State that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def other_buffer(tensor: torch.Tensor) -> torch.nn.Module:
    """A layer with this besides."""
    layer = torch.nn.Linear(2, 1)
    layer.register_buffer("other", tensor)
    return layer


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Extra(),
            r"dense tensors by name and nothing nested: _extra_state is a dict; use published_format='pth'",
        ),
        (
            Overlapping(),
            r"first and weight overlap in memory and are not the same; use published_format='pth'",
        ),
        (
            other_buffer(torch.zeros(2).to_sparse()),
            r"nothing nested: other is a tensor of layout torch.sparse_coo",
        ),
        (
            other_buffer(torch.zeros(2, dtype=torch.complex128)),
            r"nothing nested: other is of torch.complex128",
        ),
    ],
)
def test_a_model_that_cannot_be_published_is_refused(
    make_trainer: Make, model: torch.nn.Module, message: str
) -> None:
    """When the Trainer is built, not once it is trained."""
    hook = CheckpointHook(published_keys="state_dict", published_format="safetensors")
    with pytest.raises(
        ValueError, match=rf"the model's state_dict cannot be written as safetensors.*{message}"
    ):
        make_trainer(model=model, hooks=[hook])


def test_another_key_is_published(publish: Callable[..., Path]) -> None:
    """Whatever a handler has put into the checkpoint, if it is flat."""
    path = publish(None, Averages(mean={"weight": torch.ones(2)}), published_keys="mean")

    assert equal(load_file(path), {"weight": torch.ones(2)})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"layer": {"weight": torch.ones(2)}, "n": 3},
            r"nothing nested: layer is a dict, n is a int; use published_format",
        ),
        ([torch.ones(2)], r"its mean, cannot be written as safetensors: it is a list"),
    ],
)
def test_nested_keys_are_refused_by_name(make_trainer: Make, part: Any, message: str) -> None:
    """The checkpoint is saved by then."""
    hook = CheckpointHook(published_keys="mean", published_format="safetensors")
    trainer = make_trainer(hooks=[Averages(mean=part), hook])
    with pytest.raises(CheckpointError, match=message):
        trainer.train()

    assert load_checkpoint(trainer.work_dir / "epoch_1")["mean"].__class__ is part.__class__


def test_it_is_durable_before_it_has_its_name(
    publish: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synced, renamed, and its directory synced after that."""
    calls: list[tuple[str, str]] = []

    def wrap(name: str) -> None:
        original = getattr(Disk, name)

        def wrapped(self: Disk, *arguments: Any) -> Any:
            path = Path(getattr(arguments[-1], "name", "")) if name == "sync" else arguments[-1]
            calls.append(
                (name, path.suffix if name == "rename" else path.name.removeprefix(".").partition(".")[0])
            )
            return original(self, *arguments)

        monkeypatch.setattr(Disk, name, wrapped)

    for name in ("sync", "rename", "sync_directory"):
        wrap(name)
    publish()

    assert calls[-3:] == [("sync", "epoch_2"), ("rename", ".safetensors"), ("sync_directory", "run")]


def test_a_full_disk_leaves_nothing_behind(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a half file nor a temporary one."""
    trainer = make_trainer(
        hooks=[CheckpointHook(published_keys="state_dict", published_format="safetensors")]
    )
    sync = Disk.sync

    def fail(self: Disk, file: Any) -> None:
        if Path(file.name).parent == trainer.work_dir:
            raise OSError("no space left")
        sync(self, file)

    monkeypatch.setattr(Disk, "sync", fail)
    with pytest.raises(OSError, match="no space left"):
        trainer.train()

    names = {path.name for path in trainer.work_dir.iterdir() if path.is_file()}
    assert names == {"costs.json", "heartbeat.json", "run.json"}
    assert load_checkpoint(trainer.work_dir / "epoch_1")["state_dict"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"published_format": "safetensor"},
            "published_format must be 'pth' or 'safetensors', got 'safetensor': did you mean 'safetensors'",
        ),
        ({"published_format": None}, "published_format must be 'pth' or 'safetensors', got None"),
        ({"published_format": "safetensors"}, "holds the tensors of one key, .* got published_keys=None"),
        (
            {"published_format": "safetensors", "published_keys": ["state_dict", "meta"]},
            r"holds the tensors of one key, .* got published_keys=\['state_dict', 'meta'\]",
        ),
        (
            {"published_format": "safetensors", "published_keys": "optimizer"},
            "got published_keys='optimizer'",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """By the hook's constructor."""
    with pytest.raises(ValueError, match=message):
        CheckpointHook(**options)


def test_without_safetensors_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hook's constructor; what does not need it does without."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)

    CheckpointHook(published_keys="state_dict")
    with pytest.raises(ImportError, match=r"needs safetensors: pip install 'torch-eventloop\[safetensors\]'"):
        CheckpointHook(published_keys="state_dict", published_format="safetensors")
