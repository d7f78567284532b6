"""Writes each small model as Transformers does, with the logits of language models.

python -m tests.universal.families.write_models DIRECTORY
"""

import json
import pathlib
import sys
import types
import zlib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.universal.families.models import MODELS, QUANTIZED, SEEING, TOKENS, Model


def write(name: str, model: Model, directory: pathlib.Path) -> None:
    """Writes a model with random values to `directory/name`."""
    torch.manual_seed(zlib.crc32(name.encode()))
    made_of = getattr(transformers, model.architecture)
    made = made_of(made_of.config_class(**model.config)).eval()
    if model.dtype != "float32":
        made = made.to(getattr(torch, model.dtype))
    with torch.no_grad():
        # Norms and biases are constants at first.
        for values in made.state_dict().values():
            values.normal_(std=0.3)
    made.save_pretrained(directory / name)
    if name in ("llama3", "qwen3_moe"):
        made.set_experts_implementation("eager")
        with torch.no_grad():
            logits = made(torch.tensor(TOKENS)).logits
        np.save(directory / f"{name}.npy", logits.numpy())
    if model.quantized:
        quantize(directory / name, model.quantized)


def quantize(directory: pathlib.Path, how: str) -> None:
    """Quantizes a model that was saved, with the names and settings of its kind."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    settings = transformers.FineGrainedFP8Config()
    quantizer = types.SimpleNamespace(quantization_config=settings)
    if how == "mxfp4":
        settings = transformers.Mxfp4Config()
    made = {}
    for name, values in tensors.items():
        if how == "mxfp4" and name.endswith(
            ("experts.gate_up_proj", "experts.down_proj")
        ):
            experts, inputs, outputs = values.shape
            blocks = (experts, outputs, inputs // 32, 16)
            made[f"{name}_blocks"] = torch.randint(256, blocks, dtype=torch.uint8)
            # 2 to the power of the scale less 127; the least and the greatest, too.
            scales = torch.randint(120, 131, blocks[:3], dtype=torch.uint8)
            scales.view(-1)[:3] = torch.tensor([0, 1, 250], dtype=torch.uint8)
            made[f"{name}_scales"] = scales
        elif how == "fp8" and name.endswith("_proj.weight"):
            made |= Fp8Quantize(quantizer).convert({name: values})
        else:
            made[name] = values
    save_file(made, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = settings.to_dict()
    (directory / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for each, config in (MODELS | QUANTIZED | SEEING).items():
        write(each, config, pathlib.Path(sys.argv[1]))
