"""Writes each small model as Transformers does, with the logits of language models.

    python -m tests.universal.families.write_models DIRECTORY
"""

import pathlib
import sys
import zlib

import numpy as np
import torch
import transformers

from tests.universal.families.models import MODELS, TOKENS, Model


def write(name: str, model: Model, directory: pathlib.Path) -> None:
    """Writes a model with random values to `directory/name`."""
    torch.manual_seed(zlib.crc32(name.encode()))
    made_of = getattr(transformers, model.architecture)
    made = made_of(made_of.config_class(**model.config)).eval()
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


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for each, config in MODELS.items():
        write(each, config, pathlib.Path(sys.argv[1]))
