"""Divide the model of a run of `company` over its ranks by FSDP2, and save it by hand, as PyTorch's documentation does.

A run imports it before it is measured, and only where the ranks share a model.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.helpers.company_job import Job, Notes


def shard(job: Job) -> None:
    """Divide the model, give it an optimizer of the parts, and let all ranks save by hand."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in job.model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(job.model, mesh=mesh)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-3, momentum=0.9)
    job.save_on_all_ranks = _save


def _save(job: Job, notes: Notes, path: Path) -> None:
    """Save with `torch.distributed.checkpoint.save`, which syncs the files here."""
    began = monotonic()
    with notes.saving():
        model, optimizer = get_state_dict(job.model, job.optimizer)
        writer = FileSystemWriter(path, sync_files=True)
        save({"model": model, "optimizer": optimizer}, storage_writer=writer)
    notes.durable.append(monotonic() - began)
