"""One rank of a job of three, of which one is written in C++.

Makes groups in the order of groups_test.cpp, and prints their names, members
and what they reduce.
"""

import datetime

import torch
import torch.distributed as dist


def describe(group):
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    total = torch.full([5], dist.get_rank() + 1.0)
    dist.all_reduce(total, group=group)
    first = torch.tensor([dist.get_rank()])
    dist.broadcast(first, group=group, group_src=0)
    ranks = " ".join(str(rank) for rank in dist.get_process_group_ranks(group))
    print(
        f"{group.group_name}: {ranks}: rank {dist.get_rank(group)},",
        f"sum {int(total[0])}, first {int(first)}",
    )


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    # First, since their names count the groups that a rank is in.
    for _ in range(2):
        describe(dist.new_group([1, 0, 2], use_local_synchronization=True))
    describe(dist.new_group([0, 1]))
    describe(dist.new_group([2, 1]))
    describe(dist.new_group([2, 0, 1], sort_ranks=False))
    current, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    describe(current)
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    describe(dist.new_group())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
