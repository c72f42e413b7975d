"""One rank of the `ddp` benchmark in PyTorch: the same work as
benchmarks/ddp/ddp_steps.cpp, asked for in the same way.

    ddp_steps.py CASE ddp|bare
"""

import json
import math
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def wave(shape, phase, scale):
    index = torch.arange(math.prod(shape), dtype=torch.double)
    return (torch.sin(index * 0.37 + phase) * scale).float().reshape(shape)


def fill_parameters(module):
    with torch.no_grad():
        for phase, p in enumerate(module.parameters()):
            fan_in = p[0].numel() if p.dim() > 1 else p.numel()
            p.copy_(wave(p.shape, phase, 1 / math.sqrt(fan_in)))


def make_model(name):
    if name == "linear-b256":
        return nn.Sequential(nn.Linear(10, 1))
    if name == "cnn-b64":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    if name == "mlp21m-b32":
        return nn.Sequential(
            nn.Linear(1024, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 10),
        )
    return nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 10))


def make_batch(name, rank):
    def labels(n):
        return (torch.arange(n) * 7 + rank) % 10

    if name == "linear-b256":
        return wave((256, 10), rank, 1), wave((256, 1), rank + 0.5, 1)
    if name == "cnn-b64":
        return wave((64, 1, 28, 28), rank, 1), labels(64)
    if name == "mlp21m-b32":
        return wave((32, 1024), rank, 1), labels(32)
    return wave((64, 10), rank, 1), labels(64)


def step(model, optimizer, criterion, x, y, losses):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())


def fixed_batch(model, optimizer, name):
    x, y = make_batch(name, dist.get_rank() if dist.is_initialized() else 0)
    criterion = F.mse_loss if name == "linear-b256" else F.cross_entropy

    def run(steps, losses):
        for _ in range(steps):
            step(model, optimizer, criterion, x, y, losses)

    return run


def whole_loop(model, optimizer):
    items = 20480
    dataset = TensorDataset(wave((items, 10), 0, 1), (torch.arange(items) * 7) % 10)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=256, sampler=sampler)
    epoch = 0

    def run(steps, losses):
        nonlocal epoch
        done = 0
        while done < steps:
            sampler.set_epoch(epoch)
            epoch += 1
            for x, y in loader:
                step(model, optimizer, F.cross_entropy, x, y, losses)
                done += 1

    return run


def main():
    name, mode = sys.argv[1:]
    torch.set_num_interop_threads(1)
    module = make_model(name)
    fill_parameters(module)
    model = module
    if mode == "ddp":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(
            module, gradient_as_bucket_view=True, static_graph=True
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if name == "seed-loop":
        run = whole_loop(model, optimizer)
    else:
        run = fixed_batch(model, optimizer, name)
    for line in sys.stdin:
        steps = int(line)
        losses = []
        if mode == "ddp":
            dist.barrier()
        start = time.perf_counter()
        run(steps, losses)
        took = time.perf_counter() - start
        with torch.no_grad():
            checksum = sum(
                p.abs().sum(dtype=torch.double).item() for p in module.parameters()
            )
        print(
            json.dumps(
                {
                    "us_per_step": took * 1e6 / len(losses),
                    "first_loss": losses[0].item(),
                    "last_loss": losses[-1].item(),
                    "parameters": checksum,
                }
            ),
            flush=True,
        )
    if mode == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
