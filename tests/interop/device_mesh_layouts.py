"""Prints, as JSON, what each rank sees of some meshes."""

import json

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

SHAPES = [[8], [2, 4], [4, 2], [2, 2, 2], [1, 8], [2, 1, 4], [8, 1, 1]]
NAMES = ["dp", "cp", "tp"]


def seen(mesh):
    return {
        "mesh": mesh.mesh.tolist(),
        "shape": list(mesh.shape),
        "coordinate": list(mesh.get_coordinate()),
        "local_ranks": [mesh.get_local_rank(i) for i in range(mesh.ndim)],
        "groups": [dist.get_process_group_ranks(g) for g in mesh.get_all_groups()],
    }


def slices(mesh):
    names = mesh.mesh_dim_names
    result = {}
    for chosen in range(1, 2 ** len(names)):
        part = tuple(n for i, n in enumerate(names) if chosen >> i & 1)
        sub = mesh[part]
        result["/".join(part)] = seen(sub)
        if len(part) > 1:
            result["flat/" + "/".join(part)] = seen(sub._flatten("_".join(part)))
    return result


def main():
    result = []
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        for shape in SHAPES:
            names = tuple(NAMES[: len(shape)])
            mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
            result.append({"rank": rank, "shape": shape, "seen": slices(mesh)})
        dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
