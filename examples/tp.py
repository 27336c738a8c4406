"""Train a model whose layers are divided over all processes, with tensor parallelism.

    torchrun --nproc-per-node 2 examples/tp.py WORK_DIR EPOCHS

Start it again after a stop or a kill, on another number of processes too: it continues from the newest checkpoint.
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter

work_dir, epochs = sys.argv[1], int(sys.argv[2])
kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))

torch.manual_seed(0)  # the same data and first weights in all processes
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
train, val = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(
    kind
)
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # "4" stays whole

trainer = Trainer(
    model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    loss_fn=nn.functional.cross_entropy,
    # all processes read the same batches, so the samplers count one process
    train_loader=DataLoader(train, batch_size=64, sampler=DistributedSampler(train, 1, 0)),
    val_loader=DataLoader(val, batch_size=64),
    max_epochs=epochs,
    hooks=[CheckpointHook(interval=1, max_keep_ckpts=3, save_best="accuracy")],
    default_hooks={"logger": {"interval": 10}},
    writers=[JSONLWriter()],
    work_dir=work_dir,
    device=kind,
)
try:
    trainer.resume("auto", changed={"world_size": "apply", "batch_size": "apply"})
    print(f"rank {trainer.rank} continues after {trainer.iter} iterations", flush=True)
except FileNotFoundError:  # on all ranks, or on none
    print(f"rank {trainer.rank} begins", flush=True)
trainer.train()
dist.destroy_process_group()
