r"""Writes the logits of the models of `small_models`, by Hugging Face's Transformers.

In an environment with torch 2.13.0, transformers 5.23.0 and safetensors:

    PYTHONPATH=. python tests/maxtext/hf_logits.py tests/golden/hf_logits.npz
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from tests.maxtext import small_models


def logits(name):
    """What Transformers computes of a checkpoint as it is on the hub."""
    with tempfile.TemporaryDirectory() as directory:
        config = json.dumps(small_models.hf_config(name))
        pathlib.Path(directory, "config.json").write_text(config)
        save_file(
            small_models.tensors(name),
            f"{directory}/model.safetensors",
            {"format": "pt"},
        )
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    assert not any(info.values()), info
    with torch.no_grad():
        made = model(
            torch.from_numpy(small_models.TOKENS).long(),
            position_ids=torch.from_numpy(small_models.POSITIONS).long(),
        )
    return made.logits.numpy()


if __name__ == "__main__":
    np.savez_compressed(
        sys.argv[1], **{name: logits(name) for name in small_models.MODELS}
    )
