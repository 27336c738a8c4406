"""Count, mean and squared deviations of a population, added up batch by batch and over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Moments(NamedTuple):
    """Of C channels: how many values each has (0-dim), their mean (C,) and squared deviations (C,)."""

    total: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor


class Population:
    """What a layer was given, as count, mean and sum of squared deviations from the mean, per channel.

        population = Population(layer.running_mean)
        population.add(inputs)                      # (N, C) or (N, C, ...)

    Two sets A and B of values are combined by (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances", 1979; the law of total variance)

        d = mean_B - mean_A;  mean = mean_A + d n_B / n;  S = S_A + S_B + d^2 n_A n_B / n,  n = n_A + n_B

    which, unlike E[x^2] - E[x]^2, does not cancel where the mean is large beside the deviation. The sums are in
    float64 where the device has it. Nothing here waits for a device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        dtype = torch.float32 if like.device.type == "mps" else torch.float64
        self.count = 0
        self.mean = torch.zeros_like(like, dtype=dtype)
        self.squares = torch.zeros_like(like, dtype=dtype)

    def add(self, inputs: torch.Tensor) -> None:
        """Take in a batch (N, C, ...), every position of every sample."""
        count = inputs.numel() // max(1, inputs.shape[1])
        if not count:
            return
        if inputs.dtype in (torch.float16, torch.bfloat16):
            inputs = inputs.float()
        dims = [dim for dim in range(inputs.ndim) if dim != 1]
        variance, mean = torch.var_mean(inputs.detach(), dims, correction=0)
        total = self.count + count
        distance = mean.to(self.mean) - self.mean
        self.mean += distance * (count / total)
        self.squares += variance.to(self.mean) * count + distance.square() * (self.count * count / total)
        self.count = total


def merge_ranks(populations: list[Population]) -> list[Moments]:
    """The moments of each, over all ranks of the process group if there is one, in two collectives.

    The mean is the count-weighted mean of the ranks' means; to each rank's squares come those of its mean's
    distance from it.
    """
    if not populations:
        return []
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [Moments(_count_of(p), p.mean, p.squares) for p in populations]
    home = populations[0].mean.device
    counts = torch.stack([_count_of(p).to(home) for p in populations])
    own = [(p.count, p.mean.to(home), p.squares.to(home)) for p in populations]
    sizes = [p.mean.numel() for p in populations]
    sums = torch.cat([counts, *(mean * count for count, mean, _ in own)])
    dist.all_reduce(sums)
    counts, *totals = sums.split([len(sizes), *sizes])
    means = [total / count.clamp(min=1) for total, count in zip(totals, counts, strict=True)]
    squares = torch.cat(
        [
            square + count * (mean - common).square()
            for (count, mean, square), common in zip(own, means, strict=True)
        ]
    )
    dist.all_reduce(squares)
    merged = zip(populations, counts, means, squares.split(sizes), strict=True)
    return [Moments(*(part.to(p.mean.device) for part in moments)) for p, *moments in merged]


def _count_of(population: Population) -> torch.Tensor:
    mean = population.mean  # a fill on the device: a copy from the host would wait
    return torch.full((), population.count, dtype=mean.dtype, device=mean.device)
