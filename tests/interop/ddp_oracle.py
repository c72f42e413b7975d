"""The seed MLP by formula, 20 steps of SGD, in Python.

A world of RANK and WORLD_SIZE (Gloo, DistributedDataParallel), or without them
one process on the whole batch. Prints one JSON object: this rank's losses and
the parameters at the end.
"""

import json
import os

import torch
import torch.distributed as dist

STEPS, BATCH = 20, 64


def formula(*sizes, seed=0.0):
    numel = torch.Size(sizes).numel()
    i = torch.arange(numel, dtype=torch.float64)
    return torch.sin(i * 0.37 + seed).to(torch.float32).view(*sizes)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters(), start=1):
            parameter.copy_(formula(*parameter.shape, seed=seed) * 0.3)
    model = net
    if world > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows = BATCH // world
    inputs = formula(BATCH, 10).narrow(0, rank * rows, rows)
    labels = (torch.arange(BATCH) % 10).narrow(0, rank * rows, rows)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = torch.cat([p.detach().flatten() for p in net.parameters()])
    print(json.dumps({"losses": losses, "parameters": parameters.tolist()}))
    if world > 1:
        dist.destroy_process_group()


main()
