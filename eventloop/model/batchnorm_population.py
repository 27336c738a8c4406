"""Compute the mean and variance of each channel of a layer's inputs, batch by batch and over ranks.

`update_bn_stats` uses this module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from eventloop.costs.waits import waiting

TOGETHER = 32
"""The number of batches whose moments are combined at once.

Combining takes ten small operations, more than computing the moments of one batch.
"""


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations from the mean, of each of C channels.

    `total` is the number of values of a channel: an int for this process alone, a 0-dim tensor on the device
    for all ranks. `mean` and `squares` have the shape (C,).
    """

    total: int | torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor


class Population:
    """The inputs of a layer as count, mean and sum of squared deviations from the mean, per channel.

        population = Population(layer.running_mean)
        population.add(inputs)                      # (N, C) or (N, C, ...)

    Two sets A and B of values are combined by (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances", 1979; the law of total variance)

        d = mean_B - mean_A;  mean = mean_A + d n_B / n;  S = S_A + S_B + d^2 n_A n_B / n,  n = n_A + n_B

    which, unlike E[x^2] - E[x]^2, does not cancel if the mean is large compared with the deviation. B is a
    group of batches of equal size, whose moments are combined in the same way. The sums are float64 if the
    device supports it. No method waits for a device.

    Args:
        like: a tensor with the shape (C,) and the device of the channels.
        correction: the number subtracted from the count in the divisor of the variances that `add_moments`
            receives.
    """

    def __init__(self, like: torch.Tensor, correction: int = 0) -> None:
        dtype = torch.float32 if like.device.type == "mps" else torch.float64
        self._correction = correction
        self.count = 0
        """The number of combined values of a channel."""
        self._mean = torch.zeros_like(like, dtype=dtype)
        self._squares = torch.zeros_like(like, dtype=dtype)
        self._batches: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # variance and mean of batches not combined yet
        self._size = 0  # values of a channel in each of them

    def add(self, inputs: torch.Tensor) -> None:
        """Add the values at every position of every sample of a batch (N, C, ...)."""
        if not (count := count_of(inputs)):
            return
        if inputs.dtype in (torch.float16, torch.bfloat16):
            inputs = inputs.float()
        dims = [dim for dim in range(inputs.ndim) if dim != 1]
        # the variance of a single value is 0; divided by the count less one it would be 0 / 0
        correction = self._correction if count > 1 else 0
        self.add_moments(count, *torch.var_mean(inputs.detach(), dims, correction=correction))

    def add_moments(self, count: int, variance: torch.Tensor, mean: torch.Tensor) -> None:
        """Add a batch by its variances and means.

        Args:
            count: the number of values of each channel.
            variance, mean: tensors of shape (C,), which must not change afterwards.
        """
        if count != self._size or len(self._batches) == TOGETHER:
            self._combine()
        self._size = count
        self._batches.append((variance, mean))

    def moments(self) -> Moments:
        """Return the moments of all batches added so far."""
        self._combine()
        return Moments(self.count, self._mean, self._squares)

    def _combine(self) -> None:
        if not self._batches:
            return
        variances, means = (torch.stack(each).to(self._mean) for each in zip(*self._batches, strict=True))
        count = len(self._batches) * self._size
        self._batches.clear()
        mean = means.mean(0)
        squares = variances.sum(0) * (self._size - self._correction)
        squares += (means - mean).square().sum(0) * self._size
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

    The mean is the count-weighted mean of the ranks' means. Each rank adds the squared distance of its own
    mean from it to its squares. Without a process group the moments are this process's.
    """
    if not populations:
        return []
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [population.moments() for population in populations]
    there = [population.moments() for population in populations]
    home = there[0].mean.device
    own = [  # the number by a fill on the device: a copy from the host would wait
        (mean.new_full((), population.count, device=home), mean.to(home), squares.to(home))
        for population, (_, mean, squares) in zip(populations, there, strict=True)
    ]
    sizes = [mean.numel() for _, mean, _ in own]
    sums = torch.cat([torch.stack([total for total, _, _ in own]), *(mean * total for total, mean, _ in own)])
    with waiting("ranks", "the buffers"):
        dist.all_reduce(sums)
    counts, *totals = sums.split([len(sizes), *sizes])
    means = [total / count.clamp(min=1) for total, count in zip(totals, counts, strict=True)]
    squares = torch.cat(
        [
            square + count * (mean - common).square()
            for (count, mean, square), common in zip(own, means, strict=True)
        ]
    )
    with waiting("ranks", "the buffers"):
        dist.all_reduce(squares)
    merged = zip(there, counts, means, squares.split(sizes), strict=True)
    return [Moments(*(part.to(local.mean.device) for part in moments)) for local, *moments in merged]
