"""The work of benchmarks/collectives/collectives.cpp with PyTorch's Gloo."""

import json
import sys
import time

import torch
import torch.distributed as dist

ROOT = 0


def input_of(rank, elements):
    return torch.arange(elements, dtype=torch.float32).remainder(1000) + rank


def sum_of_inputs(elements):
    return sum(input_of(r, elements) for r in range(dist.get_world_size()))


def by_rank(parts):
    return torch.cat([parts(r) for r in range(dist.get_world_size())])


def prepare(name, elements):
    """Returns what to run, its output, and what that must be (or None)."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    share = elements // world

    def own(tensor):
        return tensor.chunk(world)[rank]

    if name == "all_reduce":
        data = input_of(rank, elements)
        return lambda: dist.all_reduce(data), data, sum_of_inputs(elements)
    if name == "broadcast":
        data = input_of(rank, elements)
        return lambda: dist.broadcast(data, ROOT), data, input_of(ROOT, elements)
    if name == "reduce":
        data = input_of(rank, elements)
        expected = sum_of_inputs(elements) if rank == ROOT else None
        return lambda: dist.reduce(data, ROOT), data, expected
    if name == "all_gather":
        data = input_of(rank, share)
        to = torch.zeros(elements)
        expected = by_rank(lambda r: input_of(r, share))
        return lambda: dist.all_gather_into_tensor(to, data), to, expected
    if name == "reduce_scatter":
        data = input_of(rank, elements)
        to = torch.zeros(share)
        expected = own(sum_of_inputs(elements))
        return lambda: dist.reduce_scatter_tensor(to, data), to, expected
    if name == "all_to_all":
        data = input_of(rank, elements)
        to = torch.zeros(elements)
        expected = by_rank(lambda r: own(input_of(r, elements)))
        return lambda: dist.all_to_all_single(to, data), to, expected
    if name == "gather":
        data = input_of(rank, share)
        to = torch.zeros(elements)
        if rank != ROOT:
            return lambda: dist.gather(data, dst=ROOT), to, None
        parts = list(to.chunk(world))
        expected = by_rank(lambda r: input_of(r, share))
        return lambda: dist.gather(data, parts, dst=ROOT), to, expected
    if name == "scatter":
        data = input_of(ROOT, elements)
        to = torch.zeros(share)
        parts = list(data.chunk(world)) if rank == ROOT else None
        return lambda: dist.scatter(to, parts, src=ROOT), to, own(data)
    if name == "send_recv":
        data = input_of(ROOT, elements)
        to = torch.zeros(elements)

        def there_and_back():
            if rank == ROOT:
                dist.send(data, 1)
                dist.recv(to, 1)
            else:
                dist.recv(to, ROOT)
                dist.send(to, ROOT)

        return there_and_back, to, data
    raise ValueError(f"unknown operation {name}")


def is_right(name, elements):
    run, output, expected = prepare(name, elements)
    run()
    return expected is None or torch.equal(output, expected)


def seconds_per_operation(name, elements, count):
    run, output, _ = prepare(name, elements)
    output.zero_()
    run()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        run()
    dist.barrier()
    return (time.perf_counter() - start) / count


dist.init_process_group("gloo")
for line in sys.stdin:
    name, size, count = line.split()
    elements = int(size) // 4
    correct = is_right(name, elements)
    seconds = seconds_per_operation(name, elements, int(count))
    print(json.dumps({"seconds": seconds, "correct": correct}), flush=True)
dist.destroy_process_group()
