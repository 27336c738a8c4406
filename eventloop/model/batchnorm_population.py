"""Compute the mean and variance of each channel of a layer's inputs, over many batches and all ranks.

`eventloop.model.batchnorm_statistics` uses this module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from eventloop.costs.waits import waiting

TOGETHER = 32
"""The number of batches whose moments are combined together.

Combining takes ten small operations, which is more than computing the moments of one batch.
"""


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations from the mean, of each of C channels."""

    total: int | torch.Tensor
    """The number of values of a channel: an int for one process, a 0-dim device tensor for all ranks."""
    mean: torch.Tensor
    """The means, of shape (C,)."""
    squares: torch.Tensor
    """The sums of squared deviations, of shape (C,)."""


class Population:
    """Accumulate the moments of a layer's inputs: count, mean and sum of squared deviations per channel.

        population = Population(layer.running_mean)
        population.add(inputs)                      # (N, C) or (N, C, ...)

    Two sets A and B of values are combined by

        d = mean_B - mean_A;  mean = mean_A + d n_B / n;  S = S_A + S_B + d^2 n_A n_B / n,  n = n_A + n_B

    (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    1979). Unlike E[x^2] - E[x]^2, this does not lose digits if the mean is large compared with the deviation.
    B is a group of batches of equal size, whose moments are combined in the same way. The sums are float64 if
    the device supports it. No method waits for a device.

    Args:
        like: a tensor with the shape (C,) and the device of the channels.
        correction: the number that is subtracted from the count in the divisor of the variances that
            `add_moments` receives: 1 if they are unbiased, else 0.
    """

    def __init__(self, like: torch.Tensor, correction: int = 0) -> None:
        dtype = torch.float32 if like.device.type == "mps" else torch.float64
        self._correction = correction
        self.count = 0
        """The number of combined values of a channel."""
        self._mean = torch.zeros_like(like, dtype=dtype)
        self._squares = torch.zeros_like(like, dtype=dtype)
        # variance and mean of each batch that is not combined yet, all with `_batch_count` values a channel
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._batch_count = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Add the values at every position of every sample of a batch (N, C, ...)."""
        if not (count := count_of(inputs)):
            return
        if inputs.dtype in (torch.float16, torch.bfloat16):
            inputs = inputs.float()
        dims = [dim for dim in range(inputs.ndim) if dim != 1]
        correction = self._correction if count > 1 else 0  # the unbiased variance of one value is 0 / 0
        self.add_moments(count, *torch.var_mean(inputs.detach(), dims, correction=correction))

    def add_moments(self, count: int, variance: torch.Tensor, mean: torch.Tensor) -> None:
        """Add a batch by its variances and means.

        Args:
            count: the number of values of each channel.
            variance, mean: tensors of shape (C,), which must not change afterwards.
        """
        if count != self._batch_count or len(self._batches) == TOGETHER:
            self._combine()
        self._batch_count = count
        self._batches.append((variance, mean))

    def moments(self) -> Moments:
        """Return the moments of all batches added so far."""
        self._combine()
        return Moments(self.count, self._mean, self._squares)

    def _combine(self) -> None:
        """Combine the moments of the waiting batches, and add them to the moments of all earlier batches."""
        if not self._batches:
            return
        variances = torch.stack([variance for variance, _ in self._batches]).to(self._mean)
        means = torch.stack([mean for _, mean in self._batches]).to(self._mean)
        count = len(self._batches) * self._batch_count
        self._batches.clear()
        # combine the waiting batches, which have equal sizes, and then add all earlier batches to the result
        mean = means.mean(0)
        squares = variances.sum(0) * (self._batch_count - self._correction)
        squares += (means - mean).square().sum(0) * self._batch_count
        total = self.count + count
        if self.count:
            distance = mean - self._mean
            mean = self._mean + distance * (count / total)
            squares += self._squares + distance.square() * (self.count * count / total)
        self.count, self._mean, self._squares = total, mean, squares


def count_of(inputs: torch.Tensor) -> int:
    """Return the number of values of each channel in a batch (N, C, ...)."""
    return inputs.numel() // max(1, inputs.shape[1])


def merge_ranks(populations: list[Population]) -> list[Moments]:
    """Return the moments of each population over all ranks of the process group, in two collectives.

    The first collective gives the counts and the common means. Then each rank moves its squares to the common
    mean, and the second collective adds them. Without a process group the moments are those of this process.
    """
    moments = [population.moments() for population in populations]
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1) or not moments:
        return moments
    device = moments[0].mean.device
    own_means = [mean.to(device) for _, mean, _ in moments]
    # a fill on the device, because a copy of the number from the host would wait
    own_counts = [own_means[0].new_full((), population.count) for population in populations]
    own_sums = [mean * count for mean, count in zip(own_means, own_counts, strict=True)]
    sizes = [mean.numel() for mean in own_means]
    sums = torch.cat([torch.stack(own_counts), *own_sums])
    with waiting("ranks", "the buffers"):
        dist.all_reduce(sums)
    counts, *totals = sums.split([len(sizes), *sizes])
    means = [total / count.clamp(min=1) for total, count in zip(totals, counts, strict=True)]
    own_squares = []  # around the common means
    for own, count, own_mean, mean in zip(moments, own_counts, own_means, means, strict=True):
        own_squares.append(own.squares.to(device) + count * (own_mean - mean).square())
    squares = torch.cat(own_squares)
    with waiting("ranks", "the buffers"):
        dist.all_reduce(squares)
    merged = zip(moments, counts, means, squares.split(sizes), strict=True)
    return [Moments(*(tensor.to(own.mean.device) for tensor in tensors)) for own, *tensors in merged]
