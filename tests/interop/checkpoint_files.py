"""Reads and writes safetensors files with the Python package.

usage: checkpoint_files.py write FILE | read FILE | module FILE
"""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file


def tensors():
    """The same formula on both sides: value i is (i * 37) % 11 - 3."""
    values = (torch.arange(24) * 37) % 11 - 3
    square = values.reshape(4, 6)
    return {
        "f64": values.double() / 8,
        "f32": square.float() / 8,
        "f16": values.half() / 8,
        "bf16": values.bfloat16() / 8,
        "i64": values,
        "i32": values.int(),
        "i16": values.short(),
        "i8": values.char(),
        "u8": (values + 3).byte(),
        "u16": (values + 3).to(torch.uint16),
        "u32": (values + 3).to(torch.uint32),
        "u64": (values + 3).to(torch.uint64),
        "bool": values > 0,
        "c64": torch.complex(values.float(), -values.float()),
        "f8_e4m3": values.float().to(torch.float8_e4m3fn),
        "f8_e5m2": values.float().to(torch.float8_e5m2),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": square.float().t().contiguous(),
    }


def read(path):
    expected = tensors()
    loaded = load_file(path)
    assert loaded.keys() == expected.keys(), loaded.keys() ^ expected.keys()
    for name, want in expected.items():
        got = loaded[name]
        assert got.dtype == want.dtype, name
        assert got.shape == want.shape, name
        view = torch.uint8 if want.numel() else want.dtype
        assert torch.equal(
            got.reshape(-1).view(view), want.reshape(-1).view(view)
        ), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"origin": "ä"}, file.metadata()


def module(path):
    """A strict load into the same structure; prints its outputs."""
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
    )
    load_model(net, path)
    inputs = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    print(json.dumps(net.eval()(inputs).tolist()))


command, path = sys.argv[1:]
if command == "write":
    save_file(tensors(), path, metadata={"origin": "ä"})
elif command == "read":
    read(path)
elif command == "module":
    module(path)
