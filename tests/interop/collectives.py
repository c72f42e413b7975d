"""One rank of a Gloo group whose other rank is written in C++.

Runs every collective in the order of gloo_test.cpp and checks the results
against the same formulas.
"""

import torch
import torch.distributed as dist

OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def values(rank, numel, dtype):
    return ((torch.arange(numel) + rank) % 3 + 1).to(dtype)


def reduced(op, numel, dtype):
    a, b = values(0, numel, torch.int64), values(1, numel, torch.int64)
    if op == "AVG":
        return (a + b).to(dtype) / 2
    result = {
        "SUM": a + b,
        "PRODUCT": a * b,
        "MIN": torch.minimum(a, b),
        "MAX": torch.maximum(a, b),
    }
    return result[op].to(dtype)


def check(what, actual, expected):
    assert torch.equal(actual, expected), (what, actual, expected)


def check_messages(rank):
    """Rank 0 is the first to send."""
    peer = 1 - rank
    for dtype in [torch.float32, torch.int64, torch.complex64]:
        for numel in [1, 1000, 300000]:
            own = values(rank, numel, dtype)
            to = torch.zeros(numel, dtype=dtype)
            if rank == 0:
                dist.send(own, peer, tag=5)
            check("source", torch.tensor(dist.recv(to, peer, tag=5)), torch.tensor(peer))
            if rank == 1:
                dist.send(own, peer, tag=5)
            check("recv", to, values(peer, numel, dtype))

    # Tags in opposite orders, and from any rank.
    works = [
        dist.isend(values(rank + tag, 50, torch.float32), peer, tag=tag)
        for tag in [1, 2]
    ]
    second, first = torch.empty(50), torch.empty(50)
    dist.irecv(second, peer, tag=2).wait()
    check("any source", torch.tensor(dist.recv(first, tag=1)), torch.tensor(peer))
    for work in works:
        work.wait()
    check("tag 1", first, values(peer + 1, 50, torch.float32))
    check("tag 2", second, values(peer + 2, 50, torch.float32))
    batched = torch.empty(9)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, values(rank, 9, torch.float32), peer),
            dist.P2POp(dist.irecv, batched, peer),
        ]
    ):
        work.wait()
    check("batch_isend_irecv", batched, values(peer, 9, torch.float32))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == 2

    for dtype in INTEGERS + FLOATS:
        ops = OPS + (["AVG"] if dtype.is_floating_point else [])
        for op in ops:
            for numel in [1, 5, 30000]:
                tensor = values(rank, numel, dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                check((op, dtype), tensor, reduced(op, numel, dtype))

    for root in range(size):
        tensor = values(rank, 7, torch.float32)
        dist.broadcast(tensor, root)
        check(("broadcast", root), tensor, values(root, 7, torch.float32))

    dist.barrier()

    own = values(rank, 6, torch.float64)
    expected = [values(r, 6, torch.float64) for r in range(size)]
    outputs = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(outputs, own)
    for r in range(size):
        check(("all_gather", r), outputs[r], expected[r])

    output = torch.empty(12, dtype=torch.float64)
    dist.all_gather_into_tensor(output, own)
    check("all_gather_into_tensor", output, torch.cat(expected))

    whole = values(rank, 8, torch.float32)
    expected = reduced("SUM", 8, torch.float32)[4 * rank : 4 * rank + 4]
    output = torch.empty(4)
    dist.reduce_scatter(output, list(whole.chunk(2)))
    check("reduce_scatter", output, expected)

    output = torch.empty(4)
    dist.reduce_scatter_tensor(output, whole)
    check("reduce_scatter_tensor", output, expected)

    for root in range(size):
        tensor = values(rank, 9, torch.float32)
        dist.reduce(tensor, root)
        if rank == root:
            check(("reduce", root), tensor, reduced("SUM", 9, torch.float32))
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.gather(own, parts if rank == root else None, root)
        if rank == root:
            for r in range(size):
                check(("gather", r), parts[r], values(r, 6, torch.float64))
        part = torch.empty_like(own)
        dist.scatter(part, parts if rank == root else None, root)
        check(("scatter", root), part, own)

    # Rank 0 sends 1 and 3 rows, rank 1 sends 2 and 4.
    def sent_by(r):
        return values(r, 2 * (2 * r + 4), torch.float32).view(-1, 2)

    first = 1 + 2 * rank
    output = torch.empty(2 * first + 1, 2)
    dist.all_to_all_single(
        output, sent_by(rank), [first, first + 1], [rank + 1, rank + 3]
    )
    rows = [sent_by(r).split([r + 1, r + 3])[rank] for r in range(size)]
    check("all_to_all_single", output, torch.cat(rows))

    check_messages(rank)

    tensor = values(rank, 1000, torch.float32)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    check("async", tensor, reduced("SUM", 1000, torch.float32))

    dist.barrier()
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main()
