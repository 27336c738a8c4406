"""A second rank for `hook_cost`: a process that takes part in the collectives of this one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from benchmarks.helpers.hook_bench import Bench
from benchmarks.helpers.timing import Case
from eventloop.hooks.sync_buffers import sync_buffers

SYNCED, BY_HAND, MMENGINE = "ours", "by hand", "mmengine"
SYNCS = 20
"""Epochs of a block."""


class Partner:
    """The second rank of a process group of two, which is made when the first block begins: what is built before, of
    ours and of the peers, would make collectives of its own.

    Args:
        bench: ends the process, and the group, with the row.
    """

    def __init__(self, bench: Bench) -> None:
        self._path = bench.own_directory() / "group"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._path), daemon=True)
        self._process.start()
        bench.stack.callback(self._end)

    @staticmethod
    def model() -> nn.Module:
        """50 batch norm layers, 150 buffers."""
        return nn.Sequential(*(nn.BatchNorm1d(144) for _ in range(50)))

    def case(self, label: str, sync: Callable[[], object], theirs: str) -> Case:
        """Return the case of a sync of buffers by both ranks.

        Args:
            sync: the call on this rank.
            theirs: the name of the call on the other rank, which is told to make it once a block.
        """

        def block() -> None:
            self._pipe.send(theirs)
            if not dist.is_initialized():
                _join(self._path, rank=0)
            for _ in range(SYNCS):
                sync()

        return Case(label, block, SYNCS)

    def _end(self) -> None:
        self._pipe.send(None)
        self._process.join(60)
        if dist.is_initialized():
            dist.destroy_process_group()


def synced_by_hand(buffers: list[torch.Tensor]) -> None:
    """The mean over the ranks of what is floating point, rank 0's of the rest."""
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    others = [buffer for buffer in buffers if not buffer.is_floating_point()]
    flat, rest = _flatten_dense_tensors(floats), _flatten_dense_tensors(others)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    dist.broadcast(rest, src=0)
    torch._foreach_copy_(floats, _unflatten_dense_tensors(flat, floats))
    torch._foreach_copy_(others, _unflatten_dense_tensors(rest, others))


def synced_by_mmengine(buffers: Iterable[torch.Tensor]) -> None:
    """What its SyncBuffersHook calls."""
    import_module("mmengine.dist").all_reduce_params(buffers, op="mean")


def _join(path: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)


def _serve(pipe: Connection, path: Path) -> None:
    """The second rank's process."""
    torch.set_num_threads(1)
    buffers = [*Partner.model().buffers()]
    own: dict[str, Callable[[list[torch.Tensor]], None]] = {
        SYNCED: sync_buffers,
        BY_HAND: synced_by_hand,
        MMENGINE: synced_by_mmengine,
    }
    while (name := pipe.recv()) is not None:
        if not dist.is_initialized():
            _join(path, rank=1)
        for _ in range(SYNCS):
            own[name](buffers)
    if dist.is_initialized():
        dist.destroy_process_group()
