"""What each rank does that loads a plain checkpoint into a divided model; `test_load_shards` starts it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.weights import prepare_model_state
from eventloop.optim.optimizer_states import load_optimizer_state
from eventloop.resume.checking import check_same_weights
from eventloop.state.rollback import Rollback
from eventloop.state.sharded import part_of

KINDS = {"FSDP2": 2, "FSDP2 on 4": 4, "HSDP": 4, "TP": 2, "FSDP+TP": 4}
"""The number of ranks, by what divides the model."""


class Net(nn.Module):
    """17 rows, which no number of ranks divides, and 3, of which some ranks have none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = nn.Linear(4, 17), nn.Linear(17, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return three numbers for each sample."""
        out: torch.Tensor = self.head(self.two(self.one(x).relu()))
        return out


class Careful(nn.Linear):
    """A layer that loads by itself, and refuses a bias of sevens after the weight is loaded."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        bias = state[f"{prefix}bias"]
        if bool((bias.to_local() if isinstance(bias, DTensor) else bias).eq(7.0).any()):
            raise ValueError("a bias of sevens")


class Failing(torch.optim.AdamW):
    """An optimizer whose loading fails after the state is loaded."""

    def load_state_dict(self, state: Any) -> None:
        """Load, and raise."""
        super().load_state_dict(state)
        raise ValueError("no such state")


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step of a training."""
    optimizer.zero_grad()
    inputs, target = data()
    F.cross_entropy(model(inputs), target).backward()
    optimizer.step()


def divided(kind: str, mesh: DeviceMesh, model: nn.Module | None = None) -> Any:
    """A model divided over the ranks, with other weights than the file's."""
    model = Net() if model is None else model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    if "TP" in kind:
        # between the two a whole tensor: PyTorch takes parts of 17 for those of an even number
        one = ColwiseParallel(output_layouts=Replicate())
        two = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"one": one, "two": two})
    if "SDP" in kind:
        over = mesh["dp"] if kind == "FSDP+TP" else mesh
        fully_shard(model.one, mesh=over)  # type: ignore[arg-type]
        fully_shard(model, mesh=over)
    return model


def whole(tensor: Any) -> torch.Tensor:
    """The tensor of all ranks."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names of tensors that differ in a bit or in their type."""
    return [
        name
        for name in theirs
        if ours[name].dtype != theirs[name].dtype or not whole(ours[name]).equal(theirs[name])
    ]


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's tensors by name."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def locals_of(*mappings: Mapping[str, Any]) -> list[Any]:
    """Copies of this rank's parts."""
    return [
        (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for mapping in mappings
        for value in mapping.values()
    ]


class Rank:
    """One rank: its model, trainer and the file."""

    def __init__(self, kind: str, rank: int, rendezvous: str, file: str) -> None:
        torch.set_num_threads(1)
        self.kind, self.rank, self.ranks, self.file = kind, rank, KINDS[kind], file
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=self.ranks)
        self.folder = Path(rendezvous).parent
        shape = (2, 2) if kind in ("HSDP", "FSDP+TP") else (self.ranks,)
        names = ("dp", "tp") if len(shape) == 2 else ("tp" if kind == "TP" else "dp",)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.saved = load_checkpoint(file)
        self.model = divided(kind, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.trainer = self.build(self.model, self.optimizer)

    def build(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
        """A trainer without checkpoints of its own."""
        return Trainer(
            model,
            optimizer=optimizer,
            loss_fn=F.cross_entropy,
            train_loader=[data()],
            max_epochs=1,
            work_dir=self.folder / "run",
            default_hooks={"checkpoint": None},
            writers=[],
        )

    def in_turn(self, call: Callable[[], object]) -> None:
        """Call a function on one rank after the other, which never ends if a rank waits for another one."""
        for rank in range(self.ranks):
            if rank == self.rank:
                call()
            dist.barrier()

    def load(self, optimizer: Any, state: Any) -> None:
        """Load the state of an optimizer."""
        with Rollback("the file") as rollback:
            load_optimizer_state(optimizer, state, rollback, source="the file")
            rollback.commit([])

    def loaded(self) -> dict[str, Any]:
        """Load weights and optimizer after an evaluation, and train on."""
        with torch.no_grad():
            self.model(data()[0])
        steps: list[int] = []
        early = self.waits()
        self.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
        self.in_turn(lambda: self.trainer.load_checkpoint(self.file))
        self.in_turn(lambda: self.load(self.optimizer, self.saved["optimizer"]))
        weights = different(self.model.state_dict(), self.saved["state_dict"])
        plain = Net()
        plain.load_state_dict(self.saved["state_dict"])
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        theirs.load_state_dict(copy.deepcopy(self.saved["optimizer"]))  # it keeps the tensors it is given
        ours = states(self.model, self.optimizer)
        said = {
            "waits": early,
            "weights": weights,
            "states": different(ours, states(plain, theirs)),
            "kinds": sorted(
                {key.rpartition(".")[2] for key, each in ours.items() if isinstance(each, DTensor)}
            ),
            "steps": len(steps),
        }
        step(self.model, self.optimizer)
        step(plain, theirs)
        expected = dict(plain.named_parameters())
        said["next"] = max(
            float((whole(each) - expected[name]).abs().max()) for name, each in self.model.named_parameters()
        )
        return said

    def waits(self) -> bool:
        """Whether weights that no module can refuse are loaded only once all else is."""
        before = locals_of(self.model.state_dict())
        rollback = Rollback("the file")
        prepare_model_state(self.model, self.saved["state_dict"], rollback, strict=True, source="the file")
        return all(map(torch.equal, before, locals_of(self.model.state_dict())))

    def half(self) -> list[str]:
        """Load float32 states into the optimizer of a model in bfloat16."""
        model = divided(self.kind, self.mesh, Net().bfloat16())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.load(optimizer, self.saved["optimizer"])
        names = [name for name, _ in Net().named_parameters()]
        saved = {
            f"{name}.{key}": value
            for name, state in zip(names, self.saved["optimizer"]["state"].values(), strict=True)
            for key, value in state.items()
        }
        return different(states(model, optimizer), saved)

    def refused(self) -> dict[str, str]:
        """Load weights and states that do not fit."""
        weights, cases = self.saved["state_dict"], {}
        layout = distribute_tensor(torch.ones(6, 17), self.mesh, [Replicate()] * self.mesh.ndim)
        cases["shape"] = {**weights, "one.weight": torch.ones(16, 4)}
        cases["type"] = {**weights, "one.weight": weights["one.weight"].to(torch.complex64)}
        cases["kind"] = {**weights, "count": torch.tensor(0.5)}
        cases["missing"] = {name: each for name, each in weights.items() if name != "two.bias"}
        cases["unexpected"] = {**weights, "three.bias": torch.ones(2)}
        cases["layout"] = {**weights, "two.weight": layout}
        said = {name: self.error(lambda: self.load_weights(state)) for name, state in cases.items()}  # noqa: B023
        optimizer = self.saved["optimizer"]
        factored = {**optimizer["state"], 0: {**optimizer["state"][0], "exp_avg": torch.ones(17, 1)}}
        said["state"] = self.error(lambda: self.load(self.optimizer, {**optimizer, "state": factored}))
        return said

    def load_weights(self, weights: Any) -> None:
        """Load weights that are not in a file, as a handler of after_load_checkpoint may make them."""
        path = self.folder / f"{self.rank}.pth"
        torch.save({"state_dict": {}}, path)
        handler = self.trainer.bus.on("after_load_checkpoint")(
            lambda trainer, event: trainer.checkpoint.update(state_dict=dict(weights))
        )
        try:
            self.trainer.load_checkpoint(path)
        finally:
            self.trainer.bus.off(handler)

    def error(self, call: Callable[[], object]) -> str:
        """The error of a load that leaves all tensors as they were."""
        before = locals_of(self.model.state_dict(), states(self.model, self.optimizer))
        try:
            call()
        except Exception as error:
            after = locals_of(self.model.state_dict(), states(self.model, self.optimizer))
            same = all(map(torch.equal, before, after))
            return f"{type(error).__name__}: {error}" if same else f"changed by {error}"
        return "not refused"

    def fails_late(self) -> dict[str, Any]:
        """Load where a module or an optimizer of one rank fails after it has loaded a part."""
        net = Net()
        net.one = Careful(4, 17)
        self.model = divided(self.kind, self.mesh, net)
        self.optimizer = Failing(self.model.parameters(), lr=0.1)
        step(self.model, self.optimizer)
        self.trainer = self.build(self.model, self.optimizer)
        sevens = {**self.saved["state_dict"], "one.bias": torch.full((17,), 7.0)}
        said = {"module": self.error(lambda: self.load_weights(sevens))}
        self.in_turn(
            lambda: said.update(
                optimizer=self.error(lambda: self.load(self.optimizer, self.saved["optimizer"]))
            )
        )
        return said

    def number(self) -> list[bool]:
        """Whether step, exp_avg and exp_avg_sq of a parameter without dimensions are DTensors."""
        plain = nn.Parameter(torch.tensor(2.0))
        theirs = torch.optim.AdamW([plain])
        plain.square().backward()
        theirs.step()
        scale = distribute_tensor(torch.tensor(2.0), self.mesh, [Replicate()] * self.mesh.ndim)
        optimizer = torch.optim.AdamW([nn.Parameter(scale)])
        self.load(optimizer, theirs.state_dict())
        (state,) = optimizer.state.values()
        return [isinstance(state[key], DTensor) for key in ("step", "exp_avg", "exp_avg_sq")]

    def alone(self) -> list[int]:
        """The sizes of a part on a mesh of which only rank 0 is a member."""
        mesh = DeviceMesh("cpu", [0])
        like = distribute_tensor(torch.zeros(3), mesh, [Replicate()])
        return list(part_of(torch.ones(3), like).to_local().shape)


def main(kind: str, rank: int, rendezvous: str, file: str) -> None:
    """Do it all, and print what came of it."""
    own = Rank(kind, rank, rendezvous, file)
    said: dict[str, Any] = {
        "loaded": own.loaded(),
        "half": own.half(),
        "refused": own.refused(),
        "late": own.fails_late(),
    }
    check_same_weights(own.model.state_dict(), Path("the file"))  # other parts on each rank, no error
    said.update(number=own.number(), alone=own.alone())
    sys.stdout.write(json.dumps(said))
    dist.destroy_process_group()
