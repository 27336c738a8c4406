"""What does averaging cost an iteration, next to a bare `torch._foreach_lerp_` over the same parameters?

    python -m benchmarks.ema_cost --json benchmarks/results/ema_cost.json

The bare call is given its two lists ready: it is one pass over the parameters, and the least that an average can
cost. Beside it stand `EMAHook.after_train_iter` as the bus calls it, with the optimizer's word that it stepped; the
average by itself; and torch's own `AveragedModel`, in interleaved rounds (see `_timing`). Quote the ratios.

The models differ in what could be expensive: many small tensors, where finding them costs more than averaging them;
buffers beside them; and few large ones, where memory is what counts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks._timing import (
    Case,
    Taken,
    command_line,
    environment,
    markdown_table,
    measure,
    pinned,
    publish,
    yes_no,
)
from eventloop.events import AfterTrainIter
from eventloop.hooks.ema import EMAHook
from eventloop.model.averages import ExponentialMovingAverage
from eventloop.training.trainer import Trainer

MOMENTUM = 0.0002
GOAL = 2.0
BARE, HOOK, AVERAGE, TORCH = "_foreach_lerp_", "EMAHook", "ExponentialMovingAverage", "AveragedModel"
EVENT = AfterTrainIter(iter=7, epoch=0, batch_idx=7, max_iters=1000, max_epochs=10)


def conv_net(blocks: int, channels: int) -> nn.Module:
    """Convolutions and batch norms: three parameters and three buffers a block."""
    block = (nn.Conv2d(channels, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    return nn.Sequential(*(nn.Sequential(*deepcopy(block)) for _ in range(blocks)))


def transformer(layers: int, width: int) -> nn.Module:
    """An encoder: twelve parameters a layer, no buffers."""
    layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv net, 80 blocks of 4": lambda: conv_net(80, 4),
    "conv net, 80 blocks of 32": lambda: conv_net(80, 32),
    "conv net, 50 blocks of 128": lambda: conv_net(50, 128),
    "transformer, 20 layers of 64": lambda: transformer(20, 64),
    "transformer, 12 layers of 384": lambda: transformer(12, 384),
    "perceptron, 1 layer of 8": lambda: nn.Linear(8, 1),
}


class Bench:
    """One model, and the ways to average it."""

    def __init__(self, label: str, model: nn.Module, work_dir: str, device: str) -> None:
        self.label = label
        self.model = model.to(device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.tensors = len([*model.parameters()])
        self.buffers = len([*model.buffers()])
        self._device = device
        self.hook = EMAHook(momentum=MOMENTUM)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.trainer = Trainer(
            model, optimizer=optimizer, max_epochs=1, hooks=[self.hook], work_dir=work_dir,
            default_hooks={"checkpoint": None}, writers=[],
        )  # fmt: skip
        self.hook.before_train(self.trainer, EVENT)  # type: ignore[arg-type] # what is in the event it does not ask

    def cases(self, milliseconds: float) -> list[Case]:
        """The ways, each repeated until a block takes about so many milliseconds."""
        with torch.no_grad():
            return [self._case(name, step, milliseconds) for name, step in self._steps().items()]

    def _steps(self) -> dict[str, Callable[[], Any]]:
        model, hook, trainer, optimizer = self.model, self.hook, self.trainer, self.trainer.optimizer
        sources = [p.detach() for p in model.parameters()]
        averages = [p.clone() for p in sources]
        average = ExponentialMovingAverage(model, momentum=MOMENTUM)
        torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - MOMENTUM))
        told = [*optimizer._optimizer_step_post_hooks.values()]

        def run_hook() -> None:
            for tell in told:
                tell(optimizer, (), {})
            hook.after_train_iter(trainer, EVENT)

        return {
            BARE: lambda: torch._foreach_lerp_(averages, sources, MOMENTUM),
            HOOK: run_hook,
            AVERAGE: lambda: average.update_parameters(model),
            TORCH: lambda: torchs.update_parameters(model),
        }

    def _case(self, name: str, step: Callable[[], Any], milliseconds: float) -> Case:
        step()  # the first one copies

        def waited() -> None:
            step()
            self._wait()

        once = measure([Case(name, waited)], rounds=3)[name].median
        number = max(1, int(milliseconds / 1e3 / once))

        def block() -> None:
            for _ in range(number):
                step()
            self._wait()

        return Case(f"{name}: {self.label}", block, number)

    def _wait(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()


def rows(benches: list[Bench], taken: dict[str, Taken]) -> list[list[str]]:
    """One row a model: sizes, the bare call in µs, and the ratios to it."""
    found = []
    for bench in benches:
        bare, *others = (taken[f"{name}: {bench.label}"] for name in (BARE, HOOK, AVERAGE, TORCH))
        sizes = [f"{bench.tensors}", f"{bench.buffers}", f"{bench.parameters:,}"]
        ratios = [f"{other.ratio_to(bare):.2f}" for other in others]
        found.append([bench.label, *sizes, f"{bare.median * 1e6:.1f}", *ratios])
    return found


def goals(benches: list[Bench], taken: dict[str, Taken]) -> list[dict[str, str]]:
    """The goal for each model, and what the hook adds to the bare call. Its calls alone cost some 20 µs, so a model
    of a few small tensors, whose average takes less than that, misses the goal."""
    found = []
    for bench in benches:
        bare = taken[f"{BARE}: {bench.label}"]
        ratio = taken[f"{HOOK}: {bench.label}"].ratio_to(bare)
        more = (taken[f"{HOOK}: {bench.label}"].median - bare.median) * 1e6
        found.append(
            {
                "goal": f"EMAHook / bare, {bench.label}",
                "wanted": f"<= {GOAL}",
                "measured": f"{ratio:.2f} ({more:+.0f} µs)",
                "met": yes_no(ratio <= GOAL),
            }
        )
    return found


def report(about: dict[str, str], benches: list[Bench], taken: dict[str, Taken]) -> str:
    """The whole page."""
    met = goals(benches, taken)
    columns = ["model", "tensors", "buffers", "parameters", "bare µs"]
    columns += [f"{name} / bare" for name in (HOOK, AVERAGE, TORCH)]
    return "\n\n".join(
        [
            f"# What does averaging the weights cost an iteration?\n\n    {command_line('benchmarks.ema_cost')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "## Goal\n\n" + markdown_table([*met[0]], [[*goal.values()] for goal in met]),
            "## One update, as a multiple of a bare torch._foreach_lerp_\n\n"
            + markdown_table(columns, rows(benches, taken))
            + "\n\nThe hook evaluates with the model's own buffers; the other two copy them, or walk the model, at "
            "each update.",
        ]
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, help="rounds the medians are over")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="about how long a block takes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work_dir, torch.no_grad(), pinned() as cpu:
        benches = [Bench(label, make(), work_dir, options.device) for label, make in MODELS.items()]
        taken: dict[str, Taken] = {}
        for bench in benches:
            taken |= measure(bench.cases(options.milliseconds), rounds=options.rounds)
            bench.trainer.close()
    about = environment("torch")
    about["device"] = options.device
    about["pinned"] = "no" if cpu is None else "to one CPU, one thread of torch"
    about["rounds"] = f"{options.rounds}, medians; blocks of about {options.milliseconds:g} ms"
    figures = {name: case.record() for name, case in taken.items()}
    ratios = [
        dict(zip(("model", HOOK, AVERAGE, TORCH), [r[0], *map(float, r[5:])], strict=True))
        for r in rows(benches, taken)
    ]
    record = {"environment": about, "goals": goals(benches, taken), "ratios": ratios, "figures": figures}
    publish(report(about, benches, taken), record, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
