"""What Transformers and PEFT write and read, in an environment of theirs.

    python -m tests.universal.families.programs FUNCTION DIRECTORY ...

Directories have a directory for each model.
"""

import json
import pathlib
import sys
import types
import zlib

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.universal.families import models


def write_adapters(directory: pathlib.Path) -> None:
    """Writes two bases, and adapters with the models that PEFT makes of some."""
    torch.manual_seed(0)
    for name, tied in (("base", {}), ("tied_base", models.TIED)):
        config = transformers.LlamaConfig(**models.SIZES | models.ROPE | tied)
        transformers.LlamaForCausalLM(config).save_pretrained(directory / name)
    for name, options in (models.MERGED | models.REFUSED).items():
        base = directory / ("tied_base" if name.startswith("tied") else "base")
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        given = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "down_proj"]}
        adapted = peft.get_peft_model(model, peft.LoraConfig(**given | options))
        with torch.no_grad():
            for values in adapted.parameters():
                if values.requires_grad:
                    values.normal_(std=0.3)
        adapted.save_pretrained(directory / name / "adapter")
        if name in models.MERGED:
            adapted.merge_and_unload().save_pretrained(directory / name / "merged")


def write_models(directory: pathlib.Path) -> None:
    """Writes models with random values, and the logits of some language models."""
    every = models.MODELS | models.QUANTIZED | models.SEEING
    for name, model in every.items():
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
                logits = made(torch.tensor(models.TOKENS)).logits
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


def read(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    """The values of a model that Transformers loads with nothing left over."""
    config = transformers.AutoConfig.from_pretrained(directory)
    (architecture,) = config.architectures
    model, info = getattr(transformers, architecture).from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(info.values()), (directory, info)
    return model.state_dict()


def compare_models(before: pathlib.Path, after: pathlib.Path) -> None:
    """Compares models that were written back with those that they come from."""
    for path in sorted(after.iterdir()):
        expected, made = read(before / path.name), read(path)
        assert expected.keys() == made.keys()
        for name, values in expected.items():
            assert made[name].dtype == values.dtype, (path.name, name)
            assert torch.equal(made[name], values), (path.name, name)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    globals()[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
