"""Writes adapters of a small Llama as PEFT does, and what it merges them to.

python -m tests.universal.families.write_adapters DIRECTORY
"""

import pathlib
import sys
from typing import Any

import peft
import torch
import transformers

from tests.universal.families.models import ROPE, SIZES, TIED

Options = dict[str, Any]
MERGED: dict[str, Options] = {
    "plain": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6}},
    "saved": {"modules_to_save": ["lm_head", "norm"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
}
OTHERS: dict[str, Options] = {
    "dora": {"use_dora": True},
    "alphas": {"alpha_pattern": {"q_proj": 3}},
    "pissa": {"init_lora_weights": "pissa"},
    "biases": {"lora_bias": True},
    "tokens": {"trainable_token_indices": [1, 2]},
    # Their base has one matrix for the embedding and the head.
    "tied": {"target_modules": ["embed_tokens"]},
    "tied_saved": {"modules_to_save": ["embed_tokens"]},
}


def write(directory: pathlib.Path) -> None:
    """Writes two bases, and adapters with the models that PEFT makes of some."""
    torch.manual_seed(0)
    for name, tied in (("base", {}), ("tied_base", TIED)):
        config = transformers.LlamaConfig(**SIZES | ROPE | tied)
        transformers.LlamaForCausalLM(config).save_pretrained(directory / name)
    for name, options in (MERGED | OTHERS).items():
        base = directory / ("tied_base" if name.startswith("tied") else "base")
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        given = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "down_proj"]}
        adapted = peft.get_peft_model(model, peft.LoraConfig(**given | options))
        with torch.no_grad():
            for values in adapted.parameters():
                if values.requires_grad:
                    values.normal_(std=0.3)
        adapted.save_pretrained(directory / name / "adapter")
        if name in MERGED:
            adapted.merge_and_unload().save_pretrained(directory / name / "merged")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    write(pathlib.Path(sys.argv[1]))
