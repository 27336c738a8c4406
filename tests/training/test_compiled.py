"""`Trainer(compile=...)`: the same weights, states and numbers as without, from code that is compiled once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import CheckInvalidLossHook, CheckpointHook, EMAHook, OptimizerHook
from eventloop.writers import ConsoleWriter, JSONLWriter, TensorBoardWriter
from tests.support.inside_torch import compile_anew, compiler_counts
from tests.support.saving import same
from tests.support.trainers import MakeTrainer, batches, tiny_model

pytestmark = [  # Dynamo's
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]
WAYS = ["model", "step"]


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """Each test compiles anew."""
    compile_anew()
    yield
    compile_anew()


def _in_one_memory(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Return a function of a graph whose outputs are always in the same memory, as a CUDA graph's are."""
    kept: dict[int, torch.Tensor] = {}

    def store(position: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = kept.setdefault(position, value.detach().clone())
        if own.shape == value.shape:
            own.copy_(value)
        else:
            own = kept[position] = value.detach().clone()
        return torch.empty(0, dtype=own.dtype).set_(own.untyped_storage(), 0, own.shape, own.stride())

    def run(args: list[Any]) -> list[Any]:
        outputs = graph.forward(*args)
        args.clear()
        return [store(i, value) for i, value in enumerate(outputs)]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


replayed = aot_autograd(fw_compiler=_in_one_memory, bw_compiler=_in_one_memory)
"""A backend that overwrites the outputs of earlier calls."""


class AllPredictions:
    """A metric object that keeps the predictions of each batch until the end, as torchmetrics' AUROC does."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def reset(self) -> None:
        self.kept = []

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.kept.append(preds)

    def compute(self) -> float:
        return float(torch.cat(self.kept).double().square().sum())


class WithLoss(nn.Module):
    """Computes the loss itself, so that a compiled graph has it as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(x), target)


def train(make_trainer: MakeTrainer, work_dir: Path, **options: Any) -> Trainer:
    """Train six iterations, with a smaller last batch in the validation; the checkpoints stay."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"hooks": [EMAHook(momentum=0.5), CheckpointHook(1, by_epoch=False)], **options}
    trainer = make_trainer(
        work_dir=work_dir,
        model=model,
        optimizer=optimizer,
        val_loader=[*batches(2), *batches(1, 3)],
        **options,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("way", [pytest.param("model", marks=pytest.mark.slow), "step"])
def test_a_compiled_training_is_that_of_an_eager_one(
    make_trainer: MakeTrainer, tmp_path: Path, way: str
) -> None:
    """Losses, metrics of validations, and each checkpoint, with its average and momentum, are so to the bit; also copied
    within the next forward pass, where the eager run copies them at once."""
    at_once = [EMAHook(momentum=0.5), CheckpointHook(1, by_epoch=False, overlap=False)]
    eager = train(make_trainer, tmp_path / "eager", hooks=at_once)
    compiled = train(make_trainer, tmp_path / "compiled", compile={way: {"backend": "eager"}})

    assert compiled.metrics.history("loss").values() == eager.metrics.history("loss").values()
    assert compiled.val() == eager.val()
    for iteration in range(1, 7):
        saved, other = (
            load_checkpoint(tmp_path / each / f"iter_{iteration}") for each in ("compiled", "eager")
        )
        for part in ("state_dict", "ema_state_dict", "optimizer", "rng"):
            assert same(saved[part], other[part]), (iteration, part)


def test_a_learning_rate_test_compiles_nothing(make_trainer: MakeTrainer) -> None:
    """PyTorch compiles a step for few rates, which are left to the training."""
    trainer = make_trainer(compile={"step": {"backend": "eager"}}, train_loader=batches(3))
    before = compiler_counts()

    trainer.find_lr(iterations=20)

    assert compiler_counts() == before


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_compiled_again(make_trainer: MakeTrainer, way: str) -> None:
    """With every default hook, an average, three writers and checkpoints, the second epoch and its validation compile
    nothing, though the last batches are smaller; PyTorch alone breaks a graph, in its optimizer's step."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    counted: list[tuple[int, int, int]] = []
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        compile={way: {"backend": "aot_eager"}},
        max_epochs=5,
        schedulers=[torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=205)],
        train_loader=[*batches(40), *batches(1, 3)],
        val_loader=[*batches(4), *batches(1, 2)],
        hooks=[EMAHook(), CheckpointHook(50, by_epoch=False)],
        writers=[ConsoleWriter(), JSONLWriter(), TensorBoardWriter()],
    )
    trainer.bus.on("after_val")(lambda event: counted.append(compiler_counts()))

    trainer.train()

    assert counted == [counted[0]] * 5
    assert counted[0][:2] == ((0, 0) if way == "model" else (1, 0))


@pytest.mark.parametrize("unit", ["batch", "update"])
@pytest.mark.parametrize("way", ["model", pytest.param("step", marks=pytest.mark.slow)])
def test_outputs_that_are_overwritten(make_trainer: MakeTrainer, tmp_path: Path, way: str, unit: str) -> None:
    """What hooks, metrics and a program keep of a batch stays, although the next one computes in the same memory."""
    found: list[list[Any]] = []
    for compile in (None, {way: {"backend": replayed}}):
        model, kept = WithLoss(), list[torch.Tensor]()

        def step(trainer: Trainer, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = trainer.model(*batch)
            return loss

        def record(trainer: Trainer, event: Any, kept: list[torch.Tensor] = kept) -> None:
            kept.append(trainer.outputs["loss"])
            trainer.metrics.put_scalar("kept", trainer.outputs["loss"], smoothing_hint=False)

        trainer = make_trainer(
            work_dir=tmp_path / f"run{len(found)}",
            model=model,
            train_step=step,
            compile=compile,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            train_loader=batches(6),
            max_epochs=1,
            unit=unit,
            hooks=[OptimizerHook(cumulative_iters=3), CheckInvalidLossHook(interval=6)],
        )
        trainer.bus.subscribe(record, "after_train_iter")
        trainer.train()
        logged = [trainer.metrics.history(name).values() for name in ("loss", "kept")]
        found.append([*logged, [float(each) for each in kept], model.state_dict()])

    assert found[1][:3] == found[0][:3]
    assert same(found[1][3], found[0][3])


def test_puts_within_a_step_are_copies(make_trainer: MakeTrainer) -> None:
    """A train step puts an output of the compiled model, which the model of the next iteration overwrites."""
    model, losses = WithLoss(), list[float]()

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = trainer.model(*batch)
        trainer.metrics.put_scalar("own", loss)
        losses.append(loss.item())
        return loss * 1.0

    trainer = make_trainer(
        model=model,
        train_step=step,
        compile={"model": {"backend": replayed}},
        max_iters=6,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    trainer.train()

    assert [value for value, _ in trainer.metrics.history("own").values()] == losses


def test_predictions_that_a_metric_keeps(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A validation in compiled code gives a metric object predictions of its own."""
    options: dict[str, Any] = {"evaluator": {"squares": AllPredictions()}, "hooks": []}
    eager = train(make_trainer, tmp_path / "eager", **options)
    compiled = train(make_trainer, tmp_path / "compiled", compile={"model": {"backend": replayed}}, **options)

    assert compiled.val()["squares"] == pytest.approx(eager.val()["squares"], rel=1e-6)


@pytest.mark.parametrize("unit", ["batch", "update"])
def test_pytorch_knows_where_iterations_begin(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    """Once CUDA graphs exist, it is told before each batch of a training, a validation and a range test."""
    marks: list[str] = []
    monkeypatch.setitem(
        sys.modules, "torch._inductor.cudagraph_trees", ModuleType("torch._inductor.cudagraph_trees")
    )
    trainer = make_trainer(
        val_loader=batches(2),
        compile={"model": {"backend": "eager"}},
        sanity_val=0,
        unit=unit,
        hooks=[OptimizerHook(cumulative_iters=2)],
    )
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(trainer.mode))

    trainer.train()

    assert marks == [*["train"] * 3, *["val"] * 2] * 2
    marks.clear()
    trainer.find_lr(iterations=4)
    assert len(marks) == 4


def _steps_of(model: nn.Module) -> dict[str, tuple[torch.optim.Optimizer, str]]:
    """Optimizers, with the floats by which PyTorch compiles their steps again and again."""
    tensor_rate: dict[str, Any] = {"lr": torch.tensor(0.1), "capturable": True}
    steps: dict[str, tuple[torch.optim.Optimizer, str]] = {
        "SGD": (torch.optim.SGD(model.parameters(), lr=0.1), "lr"),
        "SGD with a tensor": (torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)), ""),
        "Adam": (torch.optim.Adam(model.parameters(), lr=0.1), ""),
        "AdamW of lists": (torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True), "lr"),
        "AdamW of lists with a tensor": (
            torch.optim.AdamW(model.parameters(), foreach=True, **tensor_rate),
            "",
        ),
    }
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "by"),
    [("SGD", "handler"), *((choice, "scheduler") for choice in _steps_of(tiny_model()))],
)
def test_a_step_that_is_compiled_for_each_rate_is_warned_of(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, choice: str, by: str
) -> None:
    """Whoever changes the rate, one warning names the floats and says what to write; without it all is compiled once."""
    model = tiny_model()
    optimizer, floats = _steps_of(model)[choice]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)]
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=schedulers if by == "scheduler" else [],
        compile={"step": {"backend": "aot_eager"}},
        max_iters=6,
    )
    if by == "handler":

        @trainer.bus.on("before_train_iter")
        def lower(trainer: Trainer, event: Any) -> None:
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 0.9

    trainer.train()

    warned = [
        r.getMessage() for r in caplog.records if "compile='step' compiles the step of" in r.getMessage()
    ]
    assert len(warned) == (floats != "")
    for warning in warned:
        assert f"{type(optimizer).__name__} again for each new value of the floats {floats}, " in warning
        assert "lr=torch.tensor(0.1)" in warning


@pytest.mark.slow
def test_other_floats_of_a_compiled_step_are_named(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule that changes betas too is warned of by their name."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=[torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)],
        compile={"step": {"backend": "aot_eager"}},
        max_iters=6,
    ).train()

    (warning,) = [r.getMessage() for r in caplog.records if "compile='step' compiles the" in r.getMessage()]
    assert "new value of the floats betas, and" in warning
    assert "let nothing but the learning rate change, and give it as a tensor" in warning


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (True, r"compile must be 'model' or 'step', or one of them with options .*, got True"),
        ({"backend": "eager"}, r"compile must be 'model' or 'step', .*, got \{'backend': 'eager'\}"),
        ({"model": {"moed": "default"}}, r"compile\['model'\]: torch.compile has no option 'moed'.*'mode'"),
    ],
)
def test_what_is_no_choice_is_refused(make_trainer: MakeTrainer, given: Any, message: str) -> None:
    """The error shows what may be given."""
    with pytest.raises((TypeError, ValueError), match=message):
        make_trainer(compile=given)


def test_a_compiled_step_that_needs_a_closure_is_refused(make_trainer: MakeTrainer) -> None:
    """The step of a compiled optimizer is read as that of any other."""
    model = tiny_model()
    with pytest.raises(TypeError, match=r"optimizer: LBFGS\.step computes the loss again by a closure"):
        make_trainer(model=model, optimizer=torch.optim.LBFGS(model.parameters()), compile="step")


def test_what_is_compiled_already_is_refused(make_trainer: MakeTrainer) -> None:
    """A model would be compiled twice, and a replaced step of an optimizer would be lost."""
    model: Any = torch.compile(tiny_model(), backend="eager")
    with pytest.raises(
        ValueError, match=r"compile: the model is compiled already, got OptimizedModule: leave"
    ):
        make_trainer(model=model, compile="model")
    model = tiny_model()
    make_trainer(model=model, compile="model")
    make_trainer(model=model, compile="model")  # a notebook's cell that is run again
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match=r"SGD\.step, and the step of optimizer was replaced by <function"):
        make_trainer(model=model, optimizer=optimizer, compile="step")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_inductor(make_trainer: MakeTrainer, tmp_path: Path, way: str) -> None:
    """PyTorch's own compiler trains to nearly the same weights, from which an eager run resumes."""
    eager = train(make_trainer, tmp_path / "eager")
    compiled = train(make_trainer, tmp_path / "compiled", compile=way)

    assert compiled.model.state_dict().keys() == eager.model.state_dict().keys()
    resumed = make_trainer(work_dir=tmp_path / "resumed", hooks=[EMAHook(momentum=0.5)])
    resumed.resume(tmp_path / "compiled" / "iter_6")
    assert resumed.iter == 6
    for name, value in compiled.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=0, atol=0)
