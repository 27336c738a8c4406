"""The statistics of batch norm layers over a population, in place of the moving average of training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from eventloop.bus.modules import eagerly
from eventloop.checkpoint.weights import modes_and_buffers_kept, unwrap
from eventloop.data.loader_info import to_device
from eventloop.data.side_pass import PutBack, apart, keeps_place, load_back
from eventloop.model.batchnorm_population import Population, count_of, merge_ranks
from eventloop.state.sharded import gathers_weights, refuse_sharded
from eventloop.util.checks import check_bools, length_of

Forward = Callable[[torch.nn.Module, Any], Any]
_END = object()


class _Stopped(Exception):
    """The pass is not to go on."""


def get_bn_modules(model: torch.nn.Module) -> list[_BatchNorm]:
    """The batch norm layers in training mode that keep running statistics; frozen ones are in eval mode."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
    ]


@torch.no_grad()
def update_bn_stats(
    model: torch.nn.Module,
    data_loader: Iterable[Any],
    num_iters: int | None = 200,
    *,
    forward: Forward | None = None,
    device: torch.device | None = None,
    unbiased: bool = False,
    stop: Callable[[], bool] = bool,
    put_back: PutBack = load_back,
) -> int:
    """Put the mean and variance of everything a pass brings to each batch norm layer into its running statistics.

        update_bn_stats(model.train(), loader, num_iters=200)

    The running average of training lags behind the weights it is used with; these are the statistics of the
    population under the weights as they are: over samples and spatial positions of all batches together, each
    sample counted once, whatever the batch sizes (fvcore's `update_bn_stats`; Wu and Johnson, "Rethinking 'Batch'
    in BatchNorm", 2021, section 3). In a process group over the samples of all ranks, and equal on all of them.

    The model runs as it is set, in training mode, and only layers in training mode are updated, by what they are given
    in that mode; those that no batch reaches keep what they have. All else is afterwards, also after an error, what it was: other buffers,
    `num_batches_tracked`, momentum, modes, random states, and the loader's place: a `DataLoader` is run as a copy, and
    what has `state_dict` and `load_state_dict` is given its state back. A loader or dataset that is itself changed by
    being read and has no such state cannot be put back; of a loader's own numbers a warning says so.

    Args:
        num_iters: batches to run; a shorter loader is started again. None for one whole pass.
        forward: `(model, batch)`; by default `model(batch)`, or `model(batch[0])` where the batch is a list or
            tuple that begins with a tensor. The model is the one inside DistributedDataParallel or
            `torch.compile`, and runs eagerly, without collectives of its own.
        device: where batches are moved; None leaves them as they are.
        unbiased: divide the variance by the number of values less one, as PyTorch's layers do for their running
            one; by default it is that of the population, divided by their number, as fvcore's is.
        stop: asked before each batch; True ends the pass, and nothing is changed.
        put_back: given a loader that the pass has moved, and the state it had before; by default it loads that. Whoever
            is in the midst of a pass over it, and wants to go on, has to open it anew then.

    Returns:
        The number of batches run here; 0 when there is no such layer, or the pass was stopped.

    Raises:
        TypeError: `unbiased` is neither True nor False, or a buffer is sharded over ranks.
        ValueError: the loader is empty, or is too short an iterator, which cannot be started again.
        RuntimeError: the loader of another rank failed. All ranks of a process group must make the call.
    """
    check_bools(unbiased=unbiased)
    layers = get_bn_modules(model)
    if not layers:
        return 0
    for name, buffer in model.named_buffers():
        refuse_sharded(f"update_bn_stats: the buffer {name!r}", buffer)
    told = {layer for layer in layers if tells_its_batch(layer)}
    populations = [Population(_tensor(layer.running_mean), int(layer in told)) for layer in layers]
    inner = unwrap(model)
    together = gathers_weights(inner) or any(isinstance(layer, SyncBatchNorm) for layer in layers)
    with ExitStack() as kept:
        loader = kept.enter_context(apart(data_loader, put_back))
        kept.enter_context(modes_and_buffers_kept(inner))
        kept.enter_context(_telling(told))
        kept.enter_context(eagerly)
        for layer, population in zip(layers, populations, strict=True):
            record = _record_told if layer in told else _record
            kept.callback(record(layer, population).remove)
        batches = kept.enter_context(closing(_batches(loader, num_iters)))
        ran = 0
        try:
            for batch in _agreed(batches, stop, together=together):
                (forward or forward_inputs)(inner, to_device(batch, device))
                ran += 1
        except _Stopped:
            return 0
    _write(layers, populations, unbiased=unbiased)
    return ran


def forward_inputs(model: torch.nn.Module, batch: Any) -> Any:
    """Run the model on a batch, or on its first part where that is a tensor and others follow."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else None
    return model(first if isinstance(first, torch.Tensor) else batch)


def tells_its_batch(layer: _BatchNorm) -> bool:
    """True for a layer whose forward is PyTorch's own, which works out the moments of its batch anyway, and with a
    momentum of 1 leaves them, as float32 at least, where its running statistics were: if a call does not say otherwise."""
    buffers = _tensor(layer.running_mean), _tensor(layer.running_var)
    return (
        type(layer).forward is _BatchNorm.forward
        and "forward" not in vars(layer)  # as those have that a library patched
        and all(buffer.dtype in (torch.float32, torch.float64) for buffer in buffers)
    )


@contextmanager
def _telling(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    momenta = {layer: layer.momentum for layer in layers}
    try:
        for layer in momenta:
            layer.momentum = 1.0
            for buffer in (layer.running_mean, layer.running_var):
                _tensor(buffer).nan_to_num_(0.0, 0.0, 0.0)  # 0 * inf, of what was, would stay in the sum
        yield
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum


def _record_told(layer: _BatchNorm, population: Population) -> Any:
    variance, mean = (
        _tensor(layer.running_var),
        _tensor(layer.running_mean),
    )  # a module finds its buffers slowly

    def see(
        module: _BatchNorm, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor], output: object
    ) -> None:
        if not module.training:
            return
        inputs, buffers = args[0] if args else kwargs["input"], module._buffers
        # a forward pass may stand apart: without tracking, with a momentum of 0, on buffers that replace these
        told = module.momentum == 1.0 and module.track_running_stats and buffers["running_var"] is variance
        if not (told and buffers["running_mean"] is mean):
            population.add(inputs)
        elif count := count_of(inputs):
            population.take(count, variance.clone(), mean.clone())

    return layer.register_forward_hook(see, with_kwargs=True)


def _record(layer: _BatchNorm, population: Population) -> Any:
    """For layers with a forward of their own: SyncBatchNorm's moments are those of all ranks, others' are not known."""

    def see(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training:
            population.add(args[0] if args else kwargs["input"])

    return layer.register_forward_pre_hook(see, with_kwargs=True)


def _write(layers: list[_BatchNorm], populations: list[Population], *, unbiased: bool) -> None:
    """In place, so that whoever shares the buffers sees it; a layer without a sample keeps what it has."""
    for layer, (total, mean, squares) in zip(layers, merge_ranks(populations), strict=True):
        buffers = _tensor(layer.running_mean), _tensor(layer.running_var)
        if isinstance(total, int):
            if total:
                buffers[0].copy_(mean)
                buffers[1].copy_(squares / max(total - unbiased, 1))
            continue
        variance = squares / (total - int(unbiased)).clamp(min=1)
        for buffer, value in zip(buffers, (mean, variance), strict=True):
            buffer.copy_(
                torch.where(total > 0, value.to(buffer), buffer)
            )  # to ask the device would wait for it


# --- the batches -------------------------------------------------------------------------------------------


def _batches(loader: Iterable[Any], limit: int | None) -> Generator[Any]:
    """So many batches, or a whole pass. Where the loader goes on where it is, the first pass is the rest of one, of which
    nothing may be left, and as many as it has make a whole."""
    if limit is None and keeps_place(loader):
        limit = length_of(loader)
    given, ended = 0, False
    while True:
        before = given
        for batch in loader:
            yield batch
            given += 1
            if given == limit:
                return
        if given == 0 and not ended:
            ended = True
            continue
        if given == 0:
            raise ValueError("precise statistics need a batch, and the data loader gave none: it is empty")
        if limit is None:
            return
        if given == before:
            raise ValueError(
                f"the data loader gave {given} batches of the {limit} wanted and, being an iterator, cannot be "
                "started again: pass the loader itself, or num_iters=None"
            )


def _agreed(batches: Iterator[Any], stop: Callable[[], bool], *, together: bool) -> Iterator[Any]:
    """Yield the batches until all ranks are through; raise `_Stopped` on all when one is told to stop.

    The ranks agree before each batch, because one that went on alone would wait for the others forever: a rank
    may be stopped, its loader may fail, or give fewer batches. With `together`, layers that gather their input
    or their weights from all ranks, the pass ends where the first loader does. Costs a small collective a batch; it
    waits for the device only where the process group has no backend for the host, as with "nccl" alone.
    """
    while True:
        error: Exception | None = None
        batch: Any = _END
        stopped = stop()
        try:
            if not stopped:
                batch = next(batches, _END)
        except Exception as failure:  # said to the others first, who would wait
            error = failure
        stops, ends, failures, ranks = _sum_over_ranks(stopped, batch is _END, error is not None)
        if error is not None:
            raise error
        if failures:
            raise RuntimeError(
                "the data loader of another rank failed, whose error says why; the statistics are as before"
            )
        if stops:
            raise _Stopped
        if ends == ranks or (ends and together):
            return
        if batch is not _END:
            yield batch


def _sum_over_ranks(*flags: bool) -> list[int]:
    """On how many ranks each is true, and the number of ranks."""
    numbers = [int(flag) for flag in (*flags, True)]
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return numbers
    host = "cpu" in str(dist.get_backend_config())
    tensor = torch.tensor(numbers, device="cpu" if host else torch.accelerator.current_accelerator())
    dist.all_reduce(tensor)
    return [int(number) for number in tensor.tolist()]


def _tensor(buffer: torch.Tensor | None) -> torch.Tensor:
    assert buffer is not None  # `get_bn_modules` takes no layer without
    return buffer
