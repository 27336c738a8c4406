"""update_bn_stats: the statistics of the whole population, and everything else as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop.hooks import get_bn_modules, update_bn_stats
from eventloop.model.batchnorm_population import TOGETHER, Population
from eventloop.model.batchnorm_statistics import stores_batch_moments
from tests.support.inside_torch import module_hooks

SHAPES = {1: (3, 5), 2: (3, 4, 5), 3: (3, 2, 3, 4)}
LAYERS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def batches_of(*sizes: int, shape: tuple[int, ...] = (3, 4, 5), mean: float = 2.0) -> list[torch.Tensor]:
    """Batches of these sizes, each channel with a mean and deviation of its own."""
    generator = torch.Generator().manual_seed(5)
    scale = torch.arange(1.0, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    return [torch.randn(size, *shape, generator=generator) * scale + mean * scale for size in sizes]


def population(batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance per channel of all batches as one, the population."""
    values = torch.cat(batches).double().transpose(0, 1).flatten(1)
    return values.mean(1).float(), values.var(1, correction=0).float()


def assert_precise(layer: Any, batches: list[torch.Tensor]) -> None:
    """The layer has the statistics of the batches it was given."""
    mean, variance = population(batches)
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, variance)


@pytest.mark.parametrize("dims", LAYERS)
def test_population_of_all_samples_and_positions(dims: int) -> None:
    """Unequal batches count by their samples, and every spatial position counts."""
    layer, batches = LAYERS[dims](3), batches_of(4, 9, 2, shape=SHAPES[dims])

    assert update_bn_stats(layer, batches, None) == 3

    assert_precise(layer, batches)


def test_rows_without_positions() -> None:
    """BatchNorm1d of (N, C) is a population of N values."""
    layer, batches = nn.BatchNorm1d(3), batches_of(6, 3, shape=(3,))

    update_bn_stats(layer, batches, None)

    assert_precise(layer, batches)


def test_sync_batch_norm_without_a_group() -> None:
    """SyncBatchNorm is a batch norm layer like others."""
    layer, batches = nn.SyncBatchNorm(3), batches_of(4, 2)

    update_bn_stats(layer, batches, None)

    assert_precise(layer, batches)


def test_unbiased_estimate() -> None:
    """`unbiased=True` divides by the number of values less one, as a layer's own running variance does."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, 2, shape=(3,))

    update_bn_stats(layer, batches, None, unbiased=True)

    torch.testing.assert_close(layer.running_var, torch.cat(batches).var(0))


def test_no_cancellation() -> None:
    """A mean a thousand deviations away leaves the variance precise."""
    layer, batches = nn.BatchNorm2d(3), batches_of(8, 8, 3, mean=1000.0)

    update_bn_stats(layer, batches, None)

    torch.testing.assert_close(layer.running_var, population(batches)[1], rtol=1e-4, atol=0)


def test_half_precision() -> None:
    """Inputs in half precision are added up in a wider type."""
    seen, batches = Population(torch.zeros(3)), batches_of(64, 64, mean=30.0)

    for batch in batches:
        seen.add(batch.bfloat16())

    mean, _ = population([batch.bfloat16().float() for batch in batches])
    total, own_mean, _ = seen.moments()
    torch.testing.assert_close(own_mean.float(), mean)
    assert total == 128 * 20


def test_many_batches_of_changing_sizes() -> None:
    """However many batches come, and in whichever order of sizes, they are one population; asked for in between too."""
    sizes = [5] * (2 * TOGETHER + 3) + [3, 5, 3, 3, 1] * 4
    seen, batches = Population(torch.zeros(3)), batches_of(*sizes, mean=30.0)

    for number, batch in enumerate(batches):
        seen.add(batch)
        if number % 17 == 0:
            seen.moments()

    total, mean, squares = seen.moments()
    expected_mean, expected_variance = population(batches)
    assert total == sum(sizes) * 20
    torch.testing.assert_close(mean.float(), expected_mean)
    torch.testing.assert_close((squares / total).float(), expected_variance)


def test_layers_behind_layers() -> None:
    """A layer's population is what reaches it: behind another, values normalized by their batch."""
    model, batches = (
        nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)),
        batches_of(5, 9, shape=(3,)),
    )
    reference = nn.BatchNorm1d(3)

    update_bn_stats(model, batches, None)

    with torch.no_grad():
        assert_precise(model[2], [reference(batch).tanh() for batch in batches])


def test_a_layer_used_twice() -> None:
    """A layer that is called twice for a batch has the population of both calls."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, 6, shape=(3,))

    update_bn_stats(layer, batches, None, forward=lambda model, batch: (model(batch), model(input=batch + 1)))

    assert_precise(layer, [*batches, *(batch + 1 for batch in batches)])


class Activated(nn.BatchNorm1d):
    """As timm's: a forward of its own, with what follows the layer in it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_layers_with_a_forward_of_their_own() -> None:
    """What a subclass, a patched layer or one in half precision leaves in its buffers is not relied on."""
    model: Any = nn.ModuleList([Activated(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3).half()])
    model[1].forward = lambda rows: nn.functional.batch_norm(rows, None, None, training=True)
    batches = [batch.half() for batch in batches_of(4, 6, shape=(3,))]

    def forward(model: Any, batch: torch.Tensor) -> None:
        model[0](batch.float())
        model[1](batch.float())
        model[2](batch)

    update_bn_stats(model, batches, None, forward=forward)

    assert not any(stores_batch_moments(layer) for layer in model)
    assert_precise(model[0], [batch.float() for batch in batches])
    assert_precise(model[1], [batch.float() for batch in batches])
    mean, variance = population(batches)
    torch.testing.assert_close(model[2].running_mean, mean.half())
    torch.testing.assert_close(model[2].running_var, variance.half())


def test_statistics_that_diverged_are_mended() -> None:
    """Running statistics that are no numbers any more are not in the precise ones."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, 6, shape=(3,))
    for buffer in (layer.running_mean, layer.running_var):
        assert buffer is not None
        buffer.copy_(torch.tensor([float("nan"), float("inf"), -float("inf")]))

    update_bn_stats(layer, batches, None)

    assert_precise(layer, batches)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), Activated(3)], ids=["PyTorch's", "its own forward"])
def test_calls_in_eval_mode_do_not_count(layer: nn.BatchNorm1d) -> None:
    """A layer that a forward switches to eval mode and back is measured by what it is given in training mode."""

    def forward(model: nn.Module, batch: torch.Tensor) -> None:
        model(batch)
        model.eval()
        model(batch + 100)
        model.train()

    batches = batches_of(4, 6, shape=(3,))
    update_bn_stats(layer, batches, None, forward=forward)

    assert_precise(layer, batches)


def untracked(layer: Any, batch: torch.Tensor) -> None:
    layer.track_running_stats = False
    layer(batch)
    layer.track_running_stats = True


def without_momentum(layer: Any, batch: torch.Tensor) -> None:
    kept, layer.momentum = layer.momentum, 0.0
    layer(batch)
    layer.momentum = kept


def on_other_buffers(layer: Any, batch: torch.Tensor) -> None:
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    torch.func.functional_call(layer, state, (batch,))


@pytest.mark.parametrize("apart", [untracked, without_momentum, on_other_buffers])
@pytest.mark.parametrize("alone", [True, False], ids=["the only pass", "beside an ordinary one"])
def test_forward_passes_that_leave_no_moments(apart: Callable[..., None], *, alone: bool) -> None:
    """What reaches a layer in a pass that does not update its buffers, as of virtual adversarial training and of SAM,
    is of the population like all else; what lay in the buffers before is not."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, 6, shape=(3,), mean=5.0)
    assert layer.running_mean is not None
    layer.running_mean.fill_(100.0)

    def forward(model: Any, batch: torch.Tensor) -> None:
        if not alone:
            model(batch)
        apart(model, batch + 1)

    update_bn_stats(layer, batches, None, forward=forward)

    given = [batch + 1 for batch in batches]
    assert_precise(layer, given if alone else [*batches, *given])


def test_a_single_value_has_no_variance() -> None:
    """One value a channel counts by its mean, whatever divisor the variances of others have."""
    seen = Population(torch.zeros(3), correction=1)
    for batch in (values := batches_of(1, 4, 1, shape=(3,))):
        seen.add(batch)

    total, mean, squares = seen.moments()
    expected_mean, expected_variance = population(values)
    torch.testing.assert_close(mean.float(), expected_mean)
    torch.testing.assert_close((squares / total).float(), expected_variance)


def test_empty_batches_do_not_count() -> None:
    """A batch without a sample, as of an image without a box, leaves the population as it is."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, 0, 6, shape=(3,))

    update_bn_stats(layer, batches, None)

    assert_precise(layer, batches)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # dynamo's
def test_compiled_models() -> None:
    """A model that was compiled before, as a whole or in part, is measured too, and not compiled once more."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    inner = nn.Sequential(nn.BatchNorm1d(3))
    inner.compile(backend=backend)
    batches = batches_of(4, 6, shape=(3,))
    inner(batches[0])
    whole: Any = torch.compile(nn.Sequential(inner), backend=backend)
    whole(batches[0])
    before = len(compiled)

    update_bn_stats(whole, batches, None)

    assert_precise(inner[0], batches)
    assert 0 < before == len(compiled)


# --- which layers ------------------------------------------------------------------------------------------


def test_frozen_layers_are_left_alone() -> None:
    """A layer in eval mode normalizes by the statistics it has, and keeps them."""
    model: Any = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3))
    batches = batches_of(4, 6, shape=(3,))

    update_bn_stats(model, batches, None)

    assert model[0].running_mean.tolist() == [0, 0, 0]
    assert model[0].running_var.tolist() == [1, 1, 1]
    assert_precise(model[1], [batch / (1 + 1e-5) ** 0.5 for batch in batches])


def test_unused_layers_keep_their_statistics() -> None:
    """A layer that no batch reaches has no population, and keeps what it has."""
    model: Any = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    model[1].running_mean.fill_(7)
    model[1].running_var.fill_(8)

    update_bn_stats(model, batches_of(4, shape=(3,)), None, forward=lambda used, batch: model[0](batch))

    assert model[1].running_mean.tolist() == [7, 7, 7]
    assert model[1].running_var.tolist() == [8, 8, 8]


def test_no_layer_no_pass() -> None:
    """Without a layer to update not one batch is read; layers without running statistics are none."""
    model = nn.Sequential(
        nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1), nn.BatchNorm1d(1).eval()
    )

    def never() -> Iterator[Any]:
        pytest.fail("a batch was read")
        yield

    assert get_bn_modules(model) == []
    assert update_bn_stats(model, never()) == 0


def test_shared_buffers_stay_shared() -> None:
    """Statistics are written in place: who holds the buffer, as a captured graph does, sees them."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, shape=(3,))
    held = layer.running_mean

    update_bn_stats(layer, batches, None)

    assert layer.running_mean is held
    assert_precise(layer, batches)


# --- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "ran"), [(2, [0, 1]), (3, [0, 1, 2]), (5, [0, 1, 2, 0, 1]), (None, [0, 1, 2])]
)
def test_short_loaders_start_again(wanted: int | None, ran: list[int]) -> None:
    """As many batches are run as wanted, from a loader with fewer by starting it again."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, 6, 3, shape=(3,))

    assert update_bn_stats(layer, batches, wanted) == len(ran)

    assert_precise(layer, [batches[index] for index in ran])


def test_iterators_of_the_right_length() -> None:
    """An iterator will do, as with fvcore, and is not read further than wanted."""
    layer, batches = nn.BatchNorm1d(3), batches_of(4, 6, 3, shape=(3,))
    left = iter(batches)

    update_bn_stats(layer, left, 2)

    assert_precise(layer, batches[:2])
    assert next(left) is batches[2]


def test_short_iterators_are_refused() -> None:
    """An iterator that ends too soon cannot be started again, and nothing is changed."""
    layer = nn.BatchNorm1d(3)

    with pytest.raises(ValueError, match=r"gave 2 batches of the 3 wanted .* pass the loader itself"):
        update_bn_stats(layer, iter(batches_of(4, 6, shape=(3,))), 3)

    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [0, 0, 0]


def test_empty_loaders_are_refused() -> None:
    """There are no statistics of nothing."""
    with pytest.raises(ValueError, match="the data loader gave none: it is empty"):
        update_bn_stats(nn.BatchNorm1d(3), [], 3)


@pytest.mark.parametrize("form", ["pair", "list", "triple", "tensor", "mapping", "list of mappings"])
def test_forms_of_batches(form: str) -> None:
    """The model is given the inputs of `(inputs, ...)`, and batches of another form whole."""
    layer, (rows,) = nn.BatchNorm1d(3), batches_of(4, shape=(3,))
    other = torch.zeros(4)
    forms: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "pair": ((rows, other), lambda batch: batch),
        "list": ([rows, other], lambda batch: batch),
        "triple": ((rows, other, other), lambda batch: batch),
        "tensor": (rows, lambda batch: batch),
        "mapping": ({"inputs": rows}, lambda batch: batch["inputs"]),
        "list of mappings": (
            [{"row": row} for row in rows],
            lambda batch: torch.stack([b["row"] for b in batch]),
        ),
    }
    batch, inputs_of = forms[form]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, given: Any) -> Any:
            return self.layer(inputs_of(given))

    update_bn_stats(Model(), [batch], None)

    assert_precise(layer, [rows])


def test_batches_are_moved() -> None:
    """`device` is where batches go."""
    layer = nn.BatchNorm1d(3)
    seen: list[str] = []

    def forward(model: nn.Module, batch: Any) -> None:
        seen.append(batch.device.type)

    update_bn_stats(layer, batches_of(4, shape=(3,)), None, forward=forward, device=torch.device("meta"))

    assert seen == ["meta"]


def test_a_stop_changes_nothing() -> None:
    """A pass that is stopped between two batches leaves the statistics as they were."""
    layer = nn.BatchNorm1d(3)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    assert update_bn_stats(layer, batches_of(4, 6, 3, shape=(3,)), None, stop=stop) == 0

    assert len(asked) == 3
    assert layer.running_var is not None
    assert layer.running_var.tolist() == [1, 1, 1]


# --- what is left as it was --------------------------------------------------------------------------------


class Restless(nn.Module):
    """Draws from every generator, and has a buffer that each forward pass changes and one that it replaces."""

    counted: torch.Tensor
    replaced: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3, momentum=0.25)
        self.cumulative = nn.BatchNorm1d(3, momentum=None)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.dropout = nn.Dropout()
        self.register_buffer("counted", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        random.random()
        np.random.rand()
        self.counted += 1
        self.replaced = self.replaced + 1
        out: torch.Tensor = self.frozen(self.cumulative(self.dropout(self.first(rows))))
        return out


class Failing:
    """A loader that draws, and raises after two batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from batches_of(4, 6, shape=(3,))
        torch.rand(1)
        raise OSError("the disk is gone")


def state_of(model: Restless) -> dict[str, Any]:
    """Everything a pass could leave changed, without the precise statistics, as plain values."""
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if not name.startswith(("first.running", "cumulative.running"))
    }
    hooks = module_hooks(model)
    return {
        "modes": [module.training for module in model.modules()],
        "momentum": [model.first.momentum, model.cumulative.momentum, model.frozen.momentum],
        "buffers": {name: buffer.tolist() for name, buffer in buffers.items()},
        "objects": [id(buffer) for buffer in model.buffers()],
        "hooks": hooks,
        "rng": [random.getstate(), str(np.random.get_state()[1].tolist()), torch.get_rng_state().tolist()],  # type: ignore[index]
        "grads": [parameter.grad for parameter in model.parameters()],
    }


@pytest.mark.parametrize("how", ["done", "loader raises", "model raises", "stopped"])
def test_all_else_is_as_it_was(how: str) -> None:
    """Modes, momentum, other buffers, counters and random states are what they were, however the pass ends."""
    model = Restless()
    rows = batches_of(4, 6, 5, shape=(3,))
    model(rows[0])
    before = state_of(model)
    statistics = [model.first.running_mean, model.first.running_var, model.cumulative.running_mean]
    values = [tensor.clone() for tensor in statistics if tensor is not None]

    def forward(model: nn.Module, batch: Any) -> Any:
        model(batch)
        model.eval()
        model(batch)
        model.train()
        if how == "model raises":
            raise ArithmeticError("overflow")

    if how == "done":
        update_bn_stats(model, rows, None, forward=forward)
    elif how == "loader raises":
        with pytest.raises(OSError, match="the disk is gone"):
            update_bn_stats(model, Failing(), 5, forward=forward)
    elif how == "model raises":
        with pytest.raises(ArithmeticError, match="overflow"):
            update_bn_stats(model, rows, None, forward=forward)
    else:
        answers = iter([False, False, True])
        assert update_bn_stats(model, rows, None, forward=forward, stop=lambda: next(answers)) == 0

    assert state_of(model) == before
    if how != "done":
        assert [tensor.tolist() for tensor in statistics if tensor is not None] == [
            v.tolist() for v in values
        ]


def shuffled(**options: Any) -> DataLoader[Any]:
    """Eight rows in random order."""
    rows = torch.arange(24.0).view(8, 3)
    return DataLoader(TensorDataset(rows), batch_size=2, shuffle=True, **options)


@pytest.mark.parametrize("own", ["own generator", "global generator"])
def test_the_loaders_order_goes_on(own: str) -> None:
    """A pass in the middle of another one over the same loader changes neither that one nor the next."""

    def orders(*, disturb: bool) -> list[list[float]]:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3) if own == "own generator" else None
        loader, seen = shuffled(generator=generator), []
        for _ in range(2):
            for index, (rows,) in enumerate(loader):
                seen.append(rows[:, 0].tolist())
                if disturb and index == 1:
                    update_bn_stats(nn.BatchNorm1d(3), loader, 6)
        return seen

    assert orders(disturb=True) == orders(disturb=False)


def test_persistent_workers_serve_training_on() -> None:
    """A pass beside one of a loader with persistent workers does not take that one's workers away."""
    loader = shuffled(num_workers=1, persistent_workers=True)
    layer = nn.BatchNorm1d(3)
    training = iter(loader)
    first = [next(training)[0]]

    update_bn_stats(layer, loader, None)

    rest = first + [rows for (rows,) in training]
    assert sorted(torch.cat(rest)[:, 0].tolist()) == [3.0 * row for row in range(8)]
    assert_precise(layer, rest)
