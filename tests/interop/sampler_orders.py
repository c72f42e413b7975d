"""Prints the orders of PyTorch's samplers and loader as one JSON object."""

import itertools
import json

import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler


def distributed():
    lengths = [0, 1, 2, 3, 7, 10, 64, 101]
    groups = [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (5, 4), (16, 9)]
    seeds = [(0, 0), (0, 1), (17, 3), (2**40, 5), (-3, 1)]
    for length, (replicas, rank), (seed, epoch), shuffle, drop_last in (
        itertools.product(lengths, groups, seeds, [True, False], [True, False])
    ):
        sampler = DistributedSampler(
            range(length),
            num_replicas=replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        sampler.set_epoch(epoch)
        yield {
            "length": length,
            "num_replicas": replicas,
            "rank": rank,
            "seed": seed,
            "epoch": epoch,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "size": len(sampler),
            "order": list(sampler),
        }


def random():
    for length, num_samples, replacement in [
        (10, None, False),
        (10, 10, False),
        (10, 4, False),
        (10, 37, False),
        (1, None, False),
        (1000, 100, True),
        (7, 40, True),
    ]:
        sampler = RandomSampler(
            range(length),
            replacement=replacement,
            num_samples=num_samples,
            generator=torch.Generator().manual_seed(5),
        )
        yield {
            "length": length,
            "num_samples": num_samples,
            "replacement": replacement,
            "passes": [list(sampler) for _ in range(3)],
        }


def loader():
    for given in [True, False]:
        torch.manual_seed(11)
        generator = torch.Generator().manual_seed(7) if given else None
        data = DataLoader(
            torch.arange(10), batch_size=4, shuffle=True, generator=generator
        )
        passes = [[batch.tolist() for batch in data] for _ in range(3)]
        yield {
            "generator": given,
            "passes": passes,
            "next_random": torch.rand(1, dtype=torch.float64).item(),
        }


print(
    json.dumps(
        {
            "distributed": list(distributed()),
            "random": list(random()),
            "loader": list(loader()),
        }
    )
)
