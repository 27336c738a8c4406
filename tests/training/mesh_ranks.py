"""A program for each rank of a training on a mesh, which prints what it has and what one process would have."""

from __future__ import annotations

RANKS = {"DDP": 2, "FSDP2": 2, "HSDP": 4, "TP": 2, "FSDP+TP": 4}
"""The number of ranks, by what divides the model or the data."""
SHARES = {"DDP": 2, "FSDP2": 2, "HSDP": 4, "TP": 1, "FSDP+TP": 2}
"""The number of ranks with different data."""

SETUP = """
import json, logging, sys
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from eventloop import Trainer
from eventloop.hooks import (ActivationStats, AmpOptimizerHook, CheckInvalidLossHook,
    EMAHook, Hook, LoggerHook, OptimizerHook, SyncBuffersHook, ThroughputHook)

torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), Path(sys.argv[2]).parent
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=RANKS)
size, share = SHARES, {"HSDP": rank, "TP": 0, "FSDP+TP": rank // 2}.get(KIND, rank)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if RANKS == 4 else (
    init_device_mesh("cpu", (2,), mesh_dim_names=("tp" if KIND == "TP" else "dp",)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.norm, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(1))  # of which one rank holds the only row
    def forward(self, x):
        return self.head(self.norm(self.two(self.one(x).relu()))) * self.scale

def divided(make=Net, two="two"):
    model = make()
    if KIND == "DDP":
        return DistributedDataParallel(model)
    if "TP" in KIND:
        parallelize_module(model, mesh["tp"], {"one": ColwiseParallel(), two: RowwiseParallel()})
    if "SDP" in KIND:
        over = mesh if KIND == "HSDP" else mesh["dp"]
        for part in (model.one, model.two):
            fully_shard(part, mesh=over)
        fully_shard(model, mesh=over)
    return model

generator = torch.Generator().manual_seed(3)
x, y = torch.randn(48, 8, generator=generator), torch.randint(3, (48,), generator=generator)
data = TensorDataset(x, y)

def loader():
    sampler = DistributedSampler(data, size, share, shuffle=False)
    return DataLoader(data, batch_size=8 // size, sampler=sampler)

def build(model, *hooks, **options):
    options = {"default_hooks": {"checkpoint": None}, "train_loader": loader(), "max_epochs": 1, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return Trainer(model, optimizer=optimizer, loss_fn=F.cross_entropy, hooks=hooks, work_dir=folder / "run",
        writers=[], **options)

def whole(model):
    model = getattr(model, "module", model)
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten()
        for p in model.parameters()]).tolist()
"""
"""Preceded by assignments of KIND, RANKS and SHARES; its arguments are those of `tests.ranks.run_ranks`."""

PROGRAM = (
    SETUP
    + """
def by_hand(*, clip=None, window=1, dtype=None, scale=None, skip=None):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None), []
    for number, (inputs, target) in enumerate(zip(x.split(8), y.split(8))):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(inputs), target) / window
        scaler.scale(loss).backward()
        if (number + 1) % window:
            continue
        if number == skip:
            model.one.weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        if clip is not None:
            norms.append(clip(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    norms = [float(norm) for norm in norms if norm is not None and norm.isfinite()]
    return {"weights": whole(model), "norms": norms, "scale": scaler.get_scale()}

class Poison(Hook):
    def after_backward(self, trainer, event):
        if trainer.iter == 2 and (rank == 0 or KIND == "DDP"):
            gradient = getattr(trainer.model, "module", trainer.model).one.weight.grad
            getattr(gradient, "_local_tensor", gradient)[0, 0] = torch.inf

class Fails(Hook):
    failed = False
    def before_optimizer_step(self, trainer, event):
        if trainer.iter == 2 and not self.failed:
            self.failed = True
            raise ArithmeticError("once")

def train(hook, *more):
    model = divided()
    trainer = build(model, hook, *more)
    try:
        trainer.train()
    except ArithmeticError:
        trainer.train()
    recorded = trainer.metrics.histories()
    norms = [value for value, _ in recorded["grad_norm"].values()] if "grad_norm" in recorded else []
    scaler = hook._precision.scaler if hook._precision is not None else None
    trainer.close()
    return {"weights": whole(model), "norms": norms, "scale": 1.0 if scaler is None else scaler.get_scale()}

def by_norm(norm_type=2.0, max_norm=0.05):
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

by_value = lambda parameters: nn.utils.clip_grad_value_([*parameters], 0.005)
half, brain = torch.float16, torch.bfloat16
clip = dict(max_norm=0.05)
said = {"ours": {
    "plain": train(OptimizerHook()),
    "norm": train(OptimizerHook(clip)),
    "norm of order 1": train(OptimizerHook({**clip, "norm_type": 1})),
    "largest norm": train(OptimizerHook({**clip, "norm_type": float("inf")})),
    "value": train(OptimizerHook(dict(clip_value=0.005))),
    "accumulation": train(OptimizerHook(clip, cumulative_iters=3)),
    "bf16": train(AmpOptimizerHook(dtype="bfloat16", grad_clip=clip)),
    "fp16 static": train(AmpOptimizerHook(512.0, "float16", grad_clip=clip)),
    "fp16 skip": train(AmpOptimizerHook(dict(init_scale=1024.0), "float16", grad_clip=clip), Poison()),
    "fp16 again": train(AmpOptimizerHook(512.0, "float16", grad_clip=dict(clip_value=0.005)), Fails()),
    "hooks": train(OptimizerHook(detect_anomalous_params=True), LoggerHook(1, reduce=True),
        CheckInvalidLossHook(1), ActivationStats('head'), SyncBuffersHook()),
}, "expected": {
    "plain": by_hand(), "hooks": by_hand(),
    "norm": by_hand(clip=by_norm()),
    "norm of order 1": by_hand(clip=by_norm(1)),
    "largest norm": by_hand(clip=by_norm(float("inf"))),
    "value": by_hand(clip=by_value),
    "accumulation": by_hand(clip=by_norm(), window=3),
    "bf16": by_hand(clip=by_norm(), dtype=brain),
    "fp16 static": by_hand(clip=by_norm(), dtype=half, scale=512.0),
    "fp16 skip": by_hand(clip=by_norm(), dtype=half, scale=1024.0, skip=2),
    "fp16 again": by_hand(clip=by_value, dtype=half, scale=512.0),
}}

warned = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("eventloop").addHandler(handler)

def refused(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        dist.barrier()
        return str(error)
    return "not refused"

trainer = build(divided(), ThroughputHook(1, flops=True), val_loader=loader(), sanity_val=0)
trainer.clock.now = lambda: float(trainer.iter)  # an iteration takes a second
trainer.train()
said["rates"] = {name: [*trainer.metrics.histories()[f"throughput/{name}_per_sec"].values()][-1][0]
    for name in ("samples", "flops")}
said["val"] = trainer.val()
alone = Net()
nn.utils.vector_to_parameters(torch.tensor(whole(trainer.model)), alone.parameters())
with torch.no_grad():
    out = alone(x)
said["val expected"] = {"loss": F.cross_entropy(out, y).item(), "accuracy": (out.argmax(1) == y).float().mean().item()}
warned.clear()
said["predicted"], said["output"] = trainer.predict(loader()).tolist(), out.tolist()
said["warned"] = warned[:]
parts = [*x[share::size].split(8)]
said["without indices"] = refused(lambda: said.update(listed=trainer.predict(parts).tolist()))
trainer.close()
said["found"] = [trainer.data_ranks, build(divided(), train_loader=[(x, y)]).data_ranks,
    build(divided(), data_ranks=1).data_ranks]
said["refused"] = {
    "data_ranks": refused(lambda: build(divided(), data_ranks=3)),
}
if KIND == "TP":
    from eventloop.optim.clipping import GradClip
    weight = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.tensor([3.0, 1.0, -3.0]) * (1 if rank else 0.5), mesh, [Partial()])
    GradClip(dict(clip_value=2.0))(torch.optim.SGD([weight], lr=1.0), over_meshes=True)
    said["sum"] = weight.grad.full_tensor().tolist()
    weight.grad, bias = None, nn.Parameter(torch.zeros(1))
    bias.grad = torch.tensor([torch.inf])
    try:
        GradClip({**clip, "error_if_nonfinite": True})(torch.optim.SGD([weight, bias]), over_meshes=True)
    except RuntimeError as error:
        said["not finite"] = str(error)
    rows = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    rows.grad = DTensor.from_local(torch.tensor([torch.nan if rank else 3.0]), mesh, [Shard(0)])
    largest = GradClip({**clip, "norm_type": torch.inf})
    said["with a NaN"] = str(largest(torch.optim.SGD([rows, bias]), over_meshes=True).item())
print(json.dumps(said))
dist.destroy_process_group()
"""
)
"""The trainings, evaluations and refusals of `test_meshes`, after `SETUP`."""
