r"""Writes the samples of PyTorch's distributed checkpoints in `data`; needs torch.

pip install torch==2.13.0 safetensors numpy zstandard
OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 4 \
    tests/universal/formats/write_dcp.py DIRECTORY

dcp/         FSDP2 over 2 x 2 (data, tensor) processes: model, Adam, numbers
dcp.npz      all tensors, whole

and with 2 processes, in dcp_saves/, the ways in which PyTorch saves:

async/       by async_save
no_dist/     one process, and a file for each tensor
zstd/        with the extension ZStandard
safetensors/ tensors as safetensors in the files
"""

import pathlib
import sys

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Model(torch.nn.Module):
    """Two matrices that tensor parallelism cuts, and a norm in bfloat16."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 5, bias=False)
        self.norm = torch.nn.LayerNorm(5, dtype=torch.bfloat16)

    def forward(self, x):
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        return self.norm(y.to(torch.bfloat16)).float()


def whole_of(value):
    """The elements of a tensor, as NumPy has them; bfloat16 as int16."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    return bits.detach().numpy()


def write_saves(directory):
    """Saves the same tensors in each way."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(20.0).reshape(5, 4)
    both = torch.arange(6.0)
    content = {
        "model": {
            "cut": distribute_tensor(whole, mesh, [Shard(0)]),
            "both": distribute_tensor(both, mesh, [Replicate()]),
        },
        "step": 3,
    }
    dcp.async_save(content, checkpoint_id=f"{directory}/async").result()
    if dist.get_rank() == 0:
        plain = {"model": {"cut": whole, "both": both}, "step": 3}
        options = {
            "no_dist": {"single_file_per_rank": False},
            "zstd": {"_extensions": [ZStandard()]},
            "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
        }
        for name, chosen in options.items():
            writer = FileSystemWriter(f"{directory}/{name}", **chosen)
            if name == "safetensors":
                del plain["step"]
            dcp.save(plain, storage_writer=writer, no_dist=True)
    dist.barrier()


def write(directory):
    """Trains two steps and saves them."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    # A group of FSDP has one type.
    fully_shard(model.norm, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    content = {
        "model": weights,
        "optim": states,
        "step": 2,
        "note": "two steps",
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }
    dcp.save(content, checkpoint_id=f"{directory}/dcp")
    flat, _ = flatten_state_dict(content)
    whole = {n: whole_of(v) for n, v in flat.items() if isinstance(v, torch.Tensor)}
    if dist.get_rank() == 0:
        np.savez_compressed(f"{directory}/dcp.npz", **whole)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    dist.init_process_group("gloo")
    if dist.get_world_size() == 2:
        write_saves(folder / "dcp_saves")
    else:
        write(folder)
    dist.destroy_process_group()
