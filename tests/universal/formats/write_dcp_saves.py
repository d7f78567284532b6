"""Writes samples of the ways in which PyTorch saves distributed checkpoints.

pip install torch==2.13.0 numpy safetensors zstandard
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 write_dcp_saves.py data/dcp_saves

async/        by async_save
no_dist/      one process, and a file for each tensor
zstd/         with the extension ZStandard
safetensors/  tensors as safetensors in the files
"""

import sys

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main(directory):
    """Saves the same tensors in each way."""
    dist.init_process_group("gloo")
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
