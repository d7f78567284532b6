r"""Writes the samples of PyTorch in `data` and the values of their tensors.

pip install torch==2.13.0 safetensors numpy zstandard
OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node PROCESSES \
    tests/universal/formats/write_torch.py DIRECTORY

With one process, weights; `expected.npz` has them, bfloat16 as int16:

weights/single/      pytorch_model.bin and config.json, as transformers wrote them
weights/sharded/     the same in two files with an index
weights/training.pt  a model, its optimizer, and objects of unknown classes
weights/no_crc.pt    the model without checksums
weights/lazy.pt      tensors whose conj or neg bit is set

With 2 processes, the ways in which PyTorch saves a distributed checkpoint:

dcp_saves/async/       by async_save
dcp_saves/no_dist/     one process, and a file for each tensor
dcp_saves/zstd/        with the extension ZStandard
dcp_saves/safetensors/ tensors as safetensors in the files

With 4, FSDP2 over 2 x 2 (data, tensor) processes: model, Adam, numbers (dcp/, dcp.npz).
"""

import argparse
import collections
import dataclasses
import enum
import io
import json
import pathlib
import sys

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel


def whole_of(value):
    """The elements of a tensor, as NumPy has them; bfloat16 as int16."""
    value = value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value
    value = value.detach().resolve_conj().resolve_neg()
    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    return bits.numpy().copy()


class CudaGraphScope(enum.Enum):
    """An enumeration that readers do not have, as Megatron's of this name."""

    ATTENTION = 2


@dataclasses.dataclass
class Settings:
    """A class that readers do not have."""

    rate: float
    names: list


def write_sharded(folder, state, config):
    folder.mkdir()
    names, weight_map = list(state), {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(config)


def write_training(path, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[1](model[0](torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    extra = io.BytesIO(b"state of another program")
    content = {
        "model": {**model.state_dict(), "1._extra_state": extra},
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, scope="x"),
        "scope": CudaGraphScope.ATTENTION,
        "settings": Settings(0.5, ["a"]),
        "counts": collections.defaultdict(list, {"seen": [1, 2]}),
        "device": torch.device("cuda", 1),
        "version": torch.__version__,
        "path": pathlib.PosixPath("/data/x"),
        "activation": torch.nn.functional.gelu,
        "scalar": np.float64(2.5),
        "rng": torch.get_rng_state()[:8].clone(),
    }
    torch.save(content, path)


def write_weights(folder):
    """Writes the samples of one process."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(6, 4),
        torch.nn.Linear(4, 3, bias=False),
        torch.nn.LayerNorm(3, dtype=torch.bfloat16),
    )
    state = model.state_dict()
    expected = {name: whole_of(tensor) for name, tensor in state.items()}
    config = json.dumps({"hidden_size": 4, "architectures": ["X"]})
    (folder / "single").mkdir()
    torch.save(state, folder / "single" / "pytorch_model.bin")
    (folder / "single" / "config.json").write_text(config)
    write_sharded(folder / "sharded", state, config)
    torch.serialization.set_crc32_options(False)
    torch.save(state, folder / "no_crc.pt")
    torch.serialization.set_crc32_options(True)
    x = torch.tensor([1 + 2j, 3 - 4j])
    lazy = {
        "conj": x.conj(),
        # A storage may have one type in a file.
        "neg": x.clone().conj().imag,
        "both": torch._neg_view(x.conj()),
        "plain": x,
    }
    torch.save(lazy, folder / "lazy.pt")
    expected |= {name: whole_of(tensor) for name, tensor in lazy.items()}
    np.savez_compressed(folder / "expected.npz", **expected)
    write_training(folder / "training.pt", model)


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


def write_saves(directory):
    """Saves the same tensors in each way."""
    mesh = init_device_mesh("cpu", (2,))
    whole = {"cut": torch.arange(20.0).reshape(5, 4), "both": torch.arange(6.0)}
    places = {"cut": [dist.tensor.Shard(0)], "both": [dist.tensor.Replicate()]}
    divided = {
        name: dist.tensor.distribute_tensor(whole[name], mesh, places[name])
        for name in whole
    }
    content = {"model": divided, "step": 3}
    dcp.async_save(content, checkpoint_id=f"{directory}/async").result()
    if dist.get_rank() == 0:
        plain = {"model": whole, "step": 3}
        options = {
            "no_dist": {"single_file_per_rank": False},
            "zstd": {"_extensions": [ZStandard()]},
            "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
        }
        for name, chosen in options.items():
            writer = dcp.FileSystemWriter(f"{directory}/{name}", **chosen)
            if name == "safetensors":
                del plain["step"]
            dcp.save(plain, storage_writer=writer, no_dist=True)
    dist.barrier()


def write_dcp(directory):
    """Trains two steps and saves them."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh["tp"], plan)
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
    if dist.get_world_size() == 1:
        write_weights(folder / "weights")
    elif dist.get_world_size() == 2:
        write_saves(folder / "dcp_saves")
    else:
        write_dcp(folder)
    dist.destroy_process_group()
