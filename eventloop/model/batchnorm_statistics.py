"""Replace the running averages of batch norm layers by the statistics of a whole population.

`PreciseBN` calls `update_bn_stats`, and a user's own training loop may call it.
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
_END = object()


class _Stopped(Exception):
    """Raised on all ranks after a rank has requested to stop the pass."""


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

    The running average of training lags behind the weights. This runs the model over `num_iters` batches and
    computes the statistics with the present weights, over samples and spatial positions of all batches, each
    sample counted once, whatever the batch sizes (fvcore's `update_bn_stats`; Wu and Johnson, "Rethinking
    'Batch' in BatchNorm", 2021, section 3). In a process group the statistics cover the samples of all ranks
    and are equal on all of them.

    Call it with the model in training mode. Only layers in training mode are updated; a layer that no batch
    reaches keeps its statistics. Everything else is restored afterwards, also after an error: other buffers,
    `num_batches_tracked`, momentum, modes, and random states. A `DataLoader` is run as a copy. A loader, a
    sampler or an iterable dataset that keeps its position is not restored: pass another one.

    Args:
        num_iters: batches to run; a shorter loader is started again. None for one whole pass.
        forward: `(model, batch)`; by default `model(batch)`, or `model(batch[0])` where the batch is a list
            or tuple that begins with a tensor. The model is the one inside DistributedDataParallel or
            `torch.compile`, and runs eagerly, without collectives of its own.
        device: device to move batches to; None leaves them where they are.
        unbiased: divide the variance by the number of values less one, as PyTorch's layers do for their
            running variance; by default divide by the number of values, as fvcore does.
        stop: called before each batch; if it returns True the pass ends and nothing is changed.

    Returns:
        The number of batches run on this rank; 0 if there is no such layer, or the pass was stopped.

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
    storing = {layer for layer in layers if stores_batch_moments(layer)}
    populations = [Population(_tensor(layer.running_mean), int(layer in storing)) for layer in layers]
    inner = unwrap(model)
    together = gathers_weights(inner) or any(isinstance(layer, SyncBatchNorm) for layer in layers)
    undo = Undo()
    with undo, undo:
        undo.step(eagerly.release, undo)
        eagerly.acquire(undo)
        loader = apart(undo, data_loader)
        save_modes_and_buffers(undo, inner)
        _store_batch_moments(undo, storing)
        hooks: list[Any] = []
        undo.step(_remove, hooks)
        for layer, population in zip(layers, populations, strict=True):
            hooks.append((_record_stored if layer in storing else _record)(layer, population))
        batches = _batches(loader, num_iters)
        undo.step(batches.close)
        agreed = _agreed(batches, stop, together=together)
        ran = _run(agreed, lambda batch: (forward or forward_inputs)(inner, to_device(batch, device)))
    if ran:
        _write(layers, populations, unbiased=unbiased)
    return ran


def _run(batches: Iterable[Any], forward: Callable[[Any], object]) -> int:
    """Run the batches, and return their number; 0 if the pass was stopped."""
    ran = 0
    try:
        for batch in batches:
            forward(batch)
            ran += 1
    except _Stopped:
        return 0
    return ran


def forward_inputs(model: torch.nn.Module, batch: Any) -> Any:
    """Return `model(batch)`, or `model(batch[0])` for a list or tuple that begins with a tensor."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else None
    return model(first if isinstance(first, torch.Tensor) else batch)


def stores_batch_moments(layer: _BatchNorm) -> bool:
    """Return whether a layer with a momentum of 1 stores the exact moments of each batch in its buffers.

    It does if it has PyTorch's own forward and float32 or float64 buffers.
    """
    buffers = _tensor(layer.running_mean), _tensor(layer.running_var)
    return (
        type(layer).forward is _BatchNorm.forward
        and "forward" not in vars(layer)  # libraries patch a layer this way
        and all(buffer.dtype in (torch.float32, torch.float64) for buffer in buffers)
    )


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _store_batch_moments(undo: Undo, layers: Iterable[_BatchNorm]) -> None:
    """Let layers store the moments of each batch until `undo`, which `stores_batch_moments` explains."""
    for layer in layers:
        undo.attributes(layer, "momentum")
        layer.momentum = 1.0
        for buffer in (layer.running_mean, layer.running_var):
            _tensor(buffer).nan_to_num_(0.0, 0.0, 0.0)  # 0 * inf of the old statistics would be NaN


def _record_stored(layer: _BatchNorm, population: Population) -> Any:
    variance, mean = (
        _tensor(layer.running_var),
        _tensor(layer.running_mean),
    )  # looked up once: attribute access on a module is slow

    def see(
        module: _BatchNorm, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor], output: object
    ) -> None:
        if not module.training:
            return
        inputs, buffers = args[0] if args else kwargs["input"], module._buffers
        # a call may run without tracking, with a momentum of 0, or with other buffers
        storing = module.momentum == 1.0 and module.track_running_stats and buffers["running_var"] is variance
        if not (storing and buffers["running_mean"] is mean):
            population.add(inputs)
        elif count := count_of(inputs):
            population.add_moments(count, variance.clone(), mean.clone())

    return layer.register_forward_hook(see, with_kwargs=True)


def _record(layer: _BatchNorm, population: Population) -> Any:
    """Register a hook that adds the inputs of a layer to `population`; return its handle.

    It is for layers whose running statistics do not give the moments of this rank's batch.
    """

    def see(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training:
            population.add(args[0] if args else kwargs["input"])

    return layer.register_forward_pre_hook(see, with_kwargs=True)


def _write(layers: list[_BatchNorm], populations: list[Population], *, unbiased: bool) -> None:
    """Write the statistics into the layers' buffers in place; a layer without samples keeps its own."""
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
            )  # no branch on `total`, which would wait for the device


# --- the batches -------------------------------------------------------------------------------------------


def _batches(loader: Iterable[Any], limit: int | None) -> Generator[Any]:
    """Yield `limit` batches, starting the loader again at its end; None yields one whole pass."""
    given = 0
    while True:
        before = given
        for batch in loader:
            yield batch
            given += 1
            if given == limit:
                return
        if given == 0:
            raise ValueError(
                "precise statistics need at least one batch, and the data loader gave none: it is empty"
            )
        if limit is None:
            return
        if given == before:
            raise ValueError(
                f"the data loader gave {given} batches of the {limit} wanted and, being an iterator, cannot "
                "be started again: pass the loader itself, or num_iters=None"
            )


def _agreed(batches: Iterator[Any], stop: Callable[[], bool], *, together: bool) -> Iterator[Any]:
    """Yield this rank's batches until all ranks have finished; the ranks agree before each batch.

    Otherwise a rank would wait forever for a rank that was stopped, whose loader failed or has fewer batches.
    An agreement costs a small collective; it waits for the device only in a process group without a backend
    for the host, such as "nccl" alone.

    Args:
        batches: this rank's batches.
        stop: returns whether the pass should stop.
        together: whether to end with the shortest loader, because layers gather inputs or weights from all
            ranks.
    """
    while True:
        error: Exception | None = None
        batch: Any = _END
        stopped = stop()
        try:
            if not stopped:
                batch = next(batches, _END)
        except Exception as failure:  # reported to the other ranks before it is raised, or they would wait
            error = failure
        stops, ends, failures, ranks = _sum_over_ranks(stopped, batch is _END, error is not None)
        if error is not None:
            raise error
        if failures:
            raise RuntimeError(
                "the data loader of another rank failed; see that rank's error. The statistics are unchanged"
            )
        if stops:
            raise _Stopped
        if ends == ranks or (ends and together):
            return
        if batch is not _END:
            yield batch


def _sum_over_ranks(*flags: bool) -> list[int]:
    """Return for each flag the number of ranks on which it is true, followed by the number of ranks."""
    numbers = [int(flag) for flag in (*flags, True)]
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return numbers
    host = dist.is_gloo_available()
    tensor = torch.tensor(numbers, device="cpu" if host else torch.accelerator.current_accelerator())
    with waiting("ranks", EXCHANGE):
        dist.all_reduce(tensor, group=host_group())
    return [int(number) for number in tensor.tolist()]


def _tensor(buffer: torch.Tensor | None) -> torch.Tensor:
    assert buffer is not None  # `get_bn_modules` leaves out layers without running statistics
    return buffer
