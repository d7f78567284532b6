"""Writes samples of weights that PyTorch saves.

pip install torch==2.13.0 numpy
OMP_NUM_THREADS=1 python write_weights.py data/weights

single/      pytorch_model.bin and config.json, as transformers wrote them
sharded/     the same in two files with an index
training.pt  a model, its optimizer, and objects of classes that readers do not have
no_crc.pt    the model without checksums
lazy.pt      tensors whose conj or neg bit is set
expected.npz the values; bfloat16 as int16
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


class CudaGraphScope(enum.Enum):
    """An enumeration that readers do not have, as Megatron's of this name."""

    ATTENTION = 2


@dataclasses.dataclass
class Settings:
    """A class that readers do not have."""

    rate: float
    names: list


def _array(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg()
    is_bfloat16 = tensor.dtype == torch.bfloat16
    return (tensor.view(torch.int16) if is_bfloat16 else tensor).numpy().copy()


def _sharded(folder, state, config):
    folder.mkdir()
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(config)


def _training(path, model):
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


def main(directory):
    """Writes all samples."""
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(6, 4),
        torch.nn.Linear(4, 3, bias=False),
        torch.nn.LayerNorm(3, dtype=torch.bfloat16),
    )
    state = model.state_dict()
    expected = {name: _array(tensor) for name, tensor in state.items()}
    config = json.dumps({"hidden_size": 4, "architectures": ["X"]})
    (folder / "single").mkdir()
    torch.save(state, folder / "single" / "pytorch_model.bin")
    (folder / "single" / "config.json").write_text(config)
    _sharded(folder / "sharded", state, config)
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
    expected |= {name: _array(tensor) for name, tensor in lazy.items()}
    np.savez_compressed(folder / "expected.npz", **expected)
    _training(folder / "training.pt", model)


if __name__ == "__main__":
    main(sys.argv[1])
