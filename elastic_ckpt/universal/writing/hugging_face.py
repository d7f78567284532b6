"""What Hugging Face's models have beside their tensors: configurations, tokenizers."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import bucket_clients, errors
from elastic_ckpt.universal.formats import bounded_json, plain_values

CONFIG = "config.json"
_URL = "hf://"
# Files that are copied with a model. Programs are not.
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)
_PROGRAMS = (".py", ".pyc", ".so")


def directory(model: str) -> epath.Path:
    """The directory of a model.

    Args:
      model: the path of a directory with `config.json`, or the name of a model that was
        downloaded before, `Qwen/Qwen3-0.6B`, also with `hf://` before it.

    Raises:
      ConfigError: if there is none.
    """
    bucket_clients.prepare(model)
    candidates = []
    if not model.startswith(_URL):
        candidates.append(epath.Path(model))
    name = model.removeprefix(_URL)
    cached = _cache() / f"models--{name.replace('/', '--')}"
    main = cached / "refs" / "main"
    if "://" not in name and main.is_file():
        candidates.append(epath.Path(cached / "snapshots" / main.read_text().strip()))
    for candidate in candidates:
        if (candidate / CONFIG).exists():
            return candidate
    raise errors.ConfigError(
        f"{model} has no {CONFIG}, and is no model in {_cache()}; give the directory of"
        " a model by --config, or download it before"
    )


def values(model: epath.Path) -> dict[str, Any]:
    """The values of a configuration by path, `config/num_attention_heads`."""
    path = model / CONFIG
    return plain_values.flatten({"config": bounded_json.read(path)}, file=str(path))


def config(model: epath.Path) -> dict[str, Any]:
    """The configuration of a model."""
    return dict(bounded_json.read(model / CONFIG))


def copied(model: epath.Path) -> Iterator[tuple[str, bytes]]:
    """The files of the tokenizer and of generation: names and contents."""
    for each in sorted(model.iterdir()):
        path = pathlib.PurePath(each.name)
        if path.suffix not in _PROGRAMS and any(map(path.match, _COPIED)):
            yield each.name, each.read_bytes()


def changed(fields: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """The configuration of a model whose tensors are of a dtype, and not quantized."""
    made = dict(fields)
    made.pop("quantization_config", None)
    keys = {"dtype", "torch_dtype"}
    for key in keys.intersection(made) or {"dtype"}:
        made[key] = dtype
    for key, each in made.items():
        # Models of several parts have a configuration of each.
        if isinstance(each, dict) and keys.intersection(each):
            made[key] = changed(each, dtype=dtype)
    return made


def _cache() -> pathlib.Path:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return pathlib.Path(
        os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))
    ).expanduser()
