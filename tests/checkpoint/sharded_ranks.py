"""What each rank of a training does whose checkpoints `test_sharded_*` read; `tests.ranks.run_ranks` starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from eventloop import Trainer
from eventloop.checkpoint.weights import unwrap
from eventloop.events import AfterTrainIter
from eventloop.hooks import CheckpointHook, EMAHook, Hook, on

KINDS = {
    "alone": 1,
    "DDP": 2,
    "DDP on 4": 4,
    "FSDP2": 2,
    "FSDP2 on 4": 4,
    "HSDP": 4,
    "TP": 2,
    "TP on 4": 4,
    "FSDP+TP": 4,
    "2 x TP": 4,
}
"""The number of ranks, by what divides the model or its data."""
SHARDED = ("FSDP2", "FSDP2 on 4", "HSDP", "TP", "TP on 4", "FSDP+TP", "2 x TP")
"""The kinds whose models have DTensors."""
SOURCES = tuple(kind for kind in KINDS if kind != "DDP on 4")
"""The kinds whose checkpoints all kinds resume; what four ranks of DDP save is what two save."""
SAVED, END = 4, 9
"""The iteration of the checkpoint that is read, within the second of three epochs, and the last iteration."""

Record = dict[str, dict[str, torch.Tensor]]


class Net(nn.Module):
    """17 rows, which no number of ranks divides, 3, of which some ranks have none, and running averages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm = nn.Linear(4, 17), nn.BatchNorm1d(17)
        self.two, self.head = nn.Linear(17, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return three numbers for each sample."""
        hidden = F.dropout(self.norm(self.one(x)).relu(), 0.3, self.training)
        out: torch.Tensor = self.head(self.two(hidden)) * self.scale
        return out


def full(value: torch.Tensor) -> torch.Tensor:
    """The tensor of all ranks."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


def own_part(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, for which no rank waits for another one."""
    part = value.to_local() if isinstance(value, DTensor) else value
    return part.detach().clone()


def recorded(trainer: Trainer, copy: Callable[[torch.Tensor], torch.Tensor] = full) -> Record:
    """Copies of weights, optimizer's states and average; of tensors without DTensors this rank's."""
    (average,) = [hook for hook in trainer.hooks if isinstance(hook, EMAHook)]
    model, optimizer = unwrap(trainer.model), trainer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    states = {
        f"{name}.{key}": copy(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    averaged = average.ema_model.module.state_dict()
    return {
        "weights": {name: copy(value) for name, value in model.state_dict().items()},
        "states": states,
        "average": {name: copy(value) for name, value in averaged.items()},
    }


def different(ours: Record, theirs: Record) -> list[str]:
    """The names of the tensors that differ in a bit, in their type, or that only one side has."""
    return [
        f"{part} {name}"
        for part in theirs
        for name in ours[part].keys() | theirs[part].keys()
        if name not in ours[part]
        or name not in theirs[part]
        or ours[part][name].dtype != theirs[part][name].dtype
        or not ours[part][name].equal(theirs[part][name])
    ]


class Recorder(Hook):
    """Records what this rank has after each iteration, and after one of them what all have."""

    def __init__(self, whole_at: int = SAVED) -> None:
        self.whole_at = whole_at
        self.records: dict[int, Record] = {}
        self.losses: dict[int, float] = {}
        self.whole: Record = {}

    @on(priority=95)
    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Keep copies."""
        self.records[trainer.iter + 1] = recorded(trainer, own_part)
        self.losses[trainer.iter + 1] = float(trainer.outputs["loss"])
        if trainer.iter + 1 == self.whole_at:
            self.whole = recorded(trainer)


class Rank:
    """One rank of a kind, which builds trainers."""

    def __init__(self, kind: str, rank: int, rendezvous: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, KINDS[kind]
        self.kind = kind = kind.removesuffix(" on 4")
        self.folder = Path(rendezvous).parent
        self.shares = {"alone": 1, "TP": 1, "2 x TP": 1, "FSDP+TP": 2}.get(kind, self.ranks)
        self.share = {"TP": 0, "2 x TP": 0, "FSDP+TP": rank // 2}.get(kind, rank)
        self.mesh: DeviceMesh | None = None
        if self.ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=self.ranks
            )
            shape = (2, 2) if kind in ("HSDP", "FSDP+TP", "2 x TP") else (self.ranks,)
            names = ("dp", "tp") if len(shape) == 2 else ("tp" if kind == "TP" else "dp",)
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def divided(self, model: nn.Module | None = None) -> Any:
        """A model that is divided over the ranks."""
        model = Net() if model is None else model
        if self.kind == "DDP":
            # else DDP orders its buckets anew after its first step, and four ranks sum in another order then
            return DistributedDataParallel(model, find_unused_parameters=self.ranks == 4)
        if self.mesh is not None and "TP" in self.kind:
            # between the two a whole tensor: PyTorch takes parts of 17 for those of an even number
            one = ColwiseParallel(output_layouts=Replicate())
            two = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(model, self.mesh["tp"], {"one": one, "two": two})
        if self.mesh is not None and "SDP" in self.kind:
            over: Any = self.mesh["dp"] if self.kind == "FSDP+TP" else self.mesh
            fully_shard(model.one, mesh=over)  # type: ignore[arg-type]
            fully_shard(model, mesh=over)
        return model

    def build(self, work_dir: Path, *hooks: Any, model: Any = None, **options: Any) -> Trainer:
        """A trainer with AdamW and an average, in the middle of whose epochs checkpoints are saved."""
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(
            torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
        )
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, self.shares, self.share, shuffle=True, seed=5
        )
        loader = DataLoader(data, batch_size=8 // self.shares, sampler=sampler)
        model = self.divided() if model is None else model
        torch.manual_seed(100 + self.share)
        options = {"max_epochs": 3, "hooks": [EMAHook(momentum=0.3), *hooks], "writers": [], **options}
        if not any(isinstance(hook, CheckpointHook) for hook in hooks):
            options["default_hooks"] = {"checkpoint": None}
        return Trainer(
            model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
            loss_fn=F.cross_entropy,
            train_loader=loader,
            work_dir=work_dir,
            **options,
        )

    def report(self, value: object) -> None:
        """Print what the test is told, and end."""
        sys.stdout.write(json.dumps(value))
        if self.ranks > 1:
            dist.destroy_process_group()


def save(kind: str, rank: int, rendezvous: str, folder: str) -> None:
    """Train with checkpoints and records, resume one checkpoint, and count what saves do."""
    own, run = Rank(kind, rank, rendezvous), Path(folder) / kind
    recorder = Recorder()
    trainer = own.build(run, CheckpointHook(interval=2, by_epoch=False), recorder)
    trainer.train()
    trainer.close()
    if rank == 0:
        torch.save(recorder.whole, run / "record.pth")
    own.report({"rest": rest(own, run, recorder), "counts": counted(own)})


def rest(own: Rank, run: Path, expected: Recorder) -> list[str]:
    """What differs in the rest of a run that is resumed."""
    recorder = Recorder()
    trainer = own.build(own.folder / "resumed", recorder)
    torch.manual_seed(1234)
    trainer.resume(run / f"iter_{SAVED}")
    at_once = recorded(trainer, own_part)
    wrong = [f"{SAVED} {each}" for each in different(at_once, expected.records[SAVED])]
    if own.kind == "DDP":  # the next forward pass begins with rank 0's running averages on all ranks
        wrong = [each for each in wrong if "running" not in each]
    trainer.train()
    for number in range(SAVED + 1, END + 1):
        if recorder.losses[number] != expected.losses[number]:
            wrong.append(f"{number} loss")
        wrong += [
            f"{number} {each}" for each in different(recorder.records[number], expected.records[number])
        ]
    return wrong


COLLECTIVES = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]
FUNCTIONAL = ["all_gather_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor"]


def counted(own: Rank) -> list[list[int]]:
    """Count collectives, calls of step hooks and of the model's state_dict with one save, and with three."""
    calls: list[str] = []
    for module, names in ((distributed_c10d, COLLECTIVES), (_functional_collectives, FUNCTIONAL)):
        for name in names:
            if hasattr(module, name):
                original = getattr(module, name)
                counting = _counting(original, calls)
                setattr(module, name, counting)
                if getattr(dist, name, None) is original:
                    setattr(dist, name, counting)
    found = []
    for interval in (100, 1):
        trainer = own.build(
            own.folder / f"counted_{interval}",
            CheckpointHook(interval=interval, by_epoch=False),
            max_epochs=1,
        )
        steps: list[int] = []
        assert isinstance(trainer.optimizer, torch.optim.Optimizer)
        trainer.optimizer.register_step_pre_hook(lambda *_, steps=steps: steps.append(1))
        trainer.optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        states: list[int] = []
        unwrap(trainer.model).register_state_dict_pre_hook(lambda *_, states=states: states.append(1))
        calls.clear()
        trainer.train()
        found.append([len(calls), len(steps), len(states)])
        trainer.close()
    return found


def _counting(original: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    @wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return counting


def load(kind: str, rank: int, rendezvous: str, folder: str) -> None:
    """Resume the checkpoint of each kind."""
    own, said = Rank(kind, rank, rendezvous), {}
    for source in SOURCES:
        run = Path(folder) / source
        expected: Record = torch.load(run / "record.pth", weights_only=True)
        trainer = own.build(own.folder / source)
        try:
            trainer.resume(run / f"iter_{SAVED}", changed="apply")
        except Exception as error:
            said[source] = [f"{type(error).__name__}: {error}"]
            continue
        wrong = different(recorded(trainer), expected)
        # each rank has recorded other running averages, of which the file has rank 0's
        said[source] = [each for each in wrong if not rank or "running" not in each]
        if trainer.iter != SAVED:
            said[source].append(f"iter {trainer.iter}")
        trainer.max_epochs = 2
        trainer.train()
        trainer.load_checkpoint(run / f"iter_{SAVED}")
        weights = {name: full(value) for name, value in unwrap(trainer.model).state_dict().items()}
        if not all(weights[name].equal(value) for name, value in expected["average"].items()):
            said[source].append("load_checkpoint")
    own.report(said)
