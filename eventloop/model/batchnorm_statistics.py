"""Replace the running statistics of batch norm layers by the statistics of many batches.

`PreciseBN` calls `update_bn_stats`; a training loop of your own may call it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from eventloop.bus.modules import eagerly
from eventloop.checkpoint.weights import save_modes_and_buffers, unwrap
from eventloop.costs.waits import waiting
from eventloop.data.loader_info import to_device
from eventloop.data.side_pass import apart
from eventloop.model.batchnorm_population import Population, count_of, merge_ranks
from eventloop.state.exchange import EXCHANGE, host_group
from eventloop.state.sharded import gathers_weights, refuse_sharded
from eventloop.state.undo import Undo
from eventloop.util.checks import check_bools

Forward = Callable[[torch.nn.Module, Any], Any]
"""A function that runs a model on a batch."""
_END = object()
"""The value in place of a batch if this rank has no more batches."""


class _Stopped(Exception):
    """Raised on all ranks if `stop` of any rank has returned True."""


def get_bn_modules(model: torch.nn.Module) -> list[_BatchNorm]:
    """Return the batch norm layers of a model that are in training mode and keep running statistics."""
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
) -> int:
    """Set the running statistics of each batch norm layer to the mean and variance of many batches.

        update_bn_stats(model.train(), loader, num_iters=200)

    The running statistics of a training lag behind the weights. This function runs the model over `num_iters`
    batches, and computes the statistics with the present weights over the samples and spatial positions of
    all batches. Each sample counts once, whatever the batch sizes (fvcore's `update_bn_stats`; Wu and
    Johnson, "Rethinking 'Batch' in BatchNorm", 2021, section 3). In a process group the statistics cover the
    samples of all ranks, and are equal on all ranks.

    Call it with the model in training mode. Only layers in training mode are updated; a layer that receives
    no batch keeps its statistics. Everything else is restored afterwards, also after an error: other buffers,
    `num_batches_tracked`, momentum, modes, and random states. A `DataLoader` is run as a copy. A loader,
    sampler or iterable dataset that stores its own position is not restored: pass another one.

    Args:
        model: the model.
        data_loader: the batches.
        num_iters: the number of batches to run; a shorter loader is started again. None runs one whole pass.
        forward: a function `(model, batch)`; by default `model(batch)`, or `model(batch[0])` if the batch is
            a list or tuple that begins with a tensor. It receives the model inside DistributedDataParallel or
            `torch.compile`, which runs eagerly, without collectives of DistributedDataParallel.
        device: the device to move batches to; None leaves them where they are.
        unbiased: whether to divide the variance by the number of values less one, as PyTorch's layers do for
            their running variance. By default it is divided by the number of values, as in fvcore.
        stop: called before each batch; if it returns True the pass ends and nothing is changed.

    Returns:
        the number of batches run on this rank; 0 if there is no such layer, or the pass was stopped.

    Raises:
        TypeError: `unbiased` is neither True nor False, or a buffer is sharded over ranks.
        ValueError: the loader is empty, or it is an iterator with too few batches, which cannot be started
            again.
        RuntimeError: the loader of another rank failed. All ranks of a process group must make the call.
    """
    check_bools(unbiased=unbiased)
    layers = get_bn_modules(model)
    if not layers:
        return 0
    for name, buffer in model.named_buffers():
        refuse_sharded(f"update_bn_stats: the buffer {name!r}", buffer)
    storing = {layer for layer in layers if stores_batch_moments(layer)}  # these give unbiased variances
    populations = [Population(_tensor(layer.running_mean), int(layer in storing)) for layer in layers]
    inner_model = unwrap(model)
    has_sync_layer = any(isinstance(layer, SyncBatchNorm) for layer in layers)
    has_collectives = gathers_weights(inner_model) or has_sync_layer
    undo = Undo()
    with undo, undo:  # twice, because an interrupt may keep one of the two from being left
        undo.step(eagerly.release, undo)
        eagerly.acquire(undo)
        loader = apart(undo, data_loader)
        save_modes_and_buffers(undo, inner_model)
        _store_batch_moments(undo, storing)
        hooks: list[Any] = []
        undo.step(_remove, hooks)
        for layer, population in zip(layers, populations, strict=True):
            register = _record_stored if layer in storing else _record
            hooks.append(register(layer, population))
        batches = _batches(loader, num_iters)
        undo.step(batches.close)
        common_batches = _in_step_with_ranks(batches, stop, end_together=has_collectives)
        run_batch = forward or forward_inputs
        batch_count = _run(common_batches, lambda batch: run_batch(inner_model, to_device(batch, device)))
    if batch_count:
        _write(layers, populations, unbiased=unbiased)
    return batch_count


def _run(batches: Iterable[Any], forward: Callable[[Any], object]) -> int:
    """Call `forward` with each batch, and return the number of batches; 0 if the pass was stopped."""
    batch_count = 0
    try:
        for batch in batches:
            forward(batch)
            batch_count += 1
    except _Stopped:
        return 0
    return batch_count


def forward_inputs(model: torch.nn.Module, batch: Any) -> Any:
    """Return `model(batch)`, or `model(batch[0])` for a list or tuple that begins with a tensor."""
    first_item = batch[0] if isinstance(batch, list | tuple) and batch else None
    return model(first_item if isinstance(first_item, torch.Tensor) else batch)


def stores_batch_moments(layer: _BatchNorm) -> bool:
    """Return whether a layer with a momentum of 1 stores the exact moments of each batch in its buffers.

    It does so if it has PyTorch's own forward and float32 or float64 buffers.
    """
    # some libraries patch `forward` of a layer object
    has_own_forward = type(layer).forward is not _BatchNorm.forward or "forward" in vars(layer)
    buffers = _tensor(layer.running_mean), _tensor(layer.running_var)
    is_exact = all(buffer.dtype in (torch.float32, torch.float64) for buffer in buffers)
    return is_exact and not has_own_forward


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _store_batch_moments(undo: Undo, layers: Iterable[_BatchNorm]) -> None:
    """Set the momentum of layers to 1, so that they store the moments of each batch in their buffers."""
    for layer in layers:
        undo.attributes(layer, "momentum")
        layer.momentum = 1.0
        for buffer in (layer.running_mean, layer.running_var):
            # the layer will multiply the old values by 0, which gives NaN for NaN and infinities
            _tensor(buffer).nan_to_num_(0.0, 0.0, 0.0)


def _record_stored(layer: _BatchNorm, population: Population) -> Any:
    """Register a hook that adds the batch moments in a layer's buffers to `population`; return its handle."""
    # looked up once, because attribute access on a module is slow
    variance, mean = _tensor(layer.running_var), _tensor(layer.running_mean)

    def add_batch(
        module: _BatchNorm, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor], output: object
    ) -> None:
        """Add the moments of the batch after a forward pass of the layer."""
        if not module.training:
            return
        inputs, buffers = args[0] if args else kwargs["input"], module._buffers
        # the program may have changed the layer for this call
        has_own_buffers = buffers["running_var"] is variance and buffers["running_mean"] is mean
        if not (module.momentum == 1.0 and module.track_running_stats and has_own_buffers):
            population.add(inputs)
        elif count := count_of(inputs):
            population.add_moments(count, variance.clone(), mean.clone())

    return layer.register_forward_hook(add_batch, with_kwargs=True)


def _record(layer: _BatchNorm, population: Population) -> Any:
    """Register a hook that adds the inputs of a layer to `population`; return its handle.

    It serves layers that do not store the exact moments of this rank's batch, such as SyncBatchNorm.
    """

    def add_inputs(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training:
            population.add(args[0] if args else kwargs["input"])

    return layer.register_forward_pre_hook(add_inputs, with_kwargs=True)


def _write(layers: list[_BatchNorm], populations: list[Population], *, unbiased: bool) -> None:
    """Write the statistics over all ranks into the layers' buffers; a layer without inputs is not changed."""
    for layer, (total, mean, squares) in zip(layers, merge_ranks(populations), strict=True):
        running_mean, running_var = _tensor(layer.running_mean), _tensor(layer.running_var)
        if isinstance(total, int):
            if total:
                running_mean.copy_(mean)
                running_var.copy_(squares / max(total - unbiased, 1))
            continue
        variance = squares / (total - int(unbiased)).clamp(min=1)
        for buffer, value in ((running_mean, mean), (running_var, variance)):
            # `if total > 0` would wait for the device
            buffer.copy_(torch.where(total > 0, value.to(buffer), buffer))


# --- the batches -------------------------------------------------------------------------------------------


def _batches(loader: Iterable[Any], limit: int | None) -> Generator[Any]:
    """Yield `limit` batches of a loader, which is started again at its end; None yields one whole pass.

    Raises:
        ValueError: the loader is empty, or is an iterator with fewer than `limit` batches.
    """
    count = 0
    while True:
        count_before_pass = count
        for batch in loader:
            yield batch
            count += 1
            if count == limit:
                return
        if count == 0:
            raise ValueError(
                "precise statistics need at least one batch, and the data loader gave none: it is empty"
            )
        if limit is None:
            return
        if count == count_before_pass:
            raise ValueError(
                f"the data loader gave {count} batches of the {limit} wanted and, being an iterator, cannot "
                "be started again: pass the loader itself, or num_iters=None"
            )


def _in_step_with_ranks(
    batches: Iterator[Any], stop: Callable[[], bool], *, end_together: bool
) -> Iterator[Any]:
    """Yield this rank's batches; before each batch, all ranks exchange whether they continue.

    Without the exchange a rank would wait forever for a rank that was stopped, whose loader has failed, or
    that has fewer batches. The exchange is a small collective. It waits for the device only in a process
    group without a backend for the host, such as "nccl" alone.

    Args:
        batches: this rank's batches.
        stop: returns whether the pass should stop.
        end_together: whether all ranks end with the shortest loader, because layers run collectives.

    Raises:
        RuntimeError: the loader of another rank has failed.
        _Stopped: `stop` has returned True on some rank.
    """
    while True:
        error: Exception | None = None
        batch: Any = _END
        is_stopped = stop()
        try:
            if not is_stopped:
                batch = next(batches, _END)
        except Exception as loader_error:  # raised after the exchange, for which the other ranks wait
            error = loader_error
        stops, ends, failures, ranks = _sum_over_ranks(is_stopped, batch is _END, error is not None)
        if error is not None:
            raise error
        if failures:
            raise RuntimeError(
                "the data loader of another rank failed; see that rank's error. The statistics are unchanged"
            )
        if stops:
            raise _Stopped
        if ends == ranks or (ends and end_together):
            return
        if batch is not _END:
            yield batch


def _sum_over_ranks(*flags: bool) -> list[int]:
    """Return for each flag the number of ranks on which it is true, followed by the number of ranks."""
    numbers = [int(flag) for flag in (*flags, True)]
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return numbers
    device = "cpu" if dist.is_gloo_available() else torch.accelerator.current_accelerator()
    tensor = torch.tensor(numbers, device=device)
    with waiting("ranks", EXCHANGE):
        dist.all_reduce(tensor, group=host_group())
    return [int(number) for number in tensor.tolist()]


def _tensor(buffer: torch.Tensor | None) -> torch.Tensor:
    """Return a running mean or variance, which is not None in the layers of `get_bn_modules`."""
    assert buffer is not None
    return buffer
