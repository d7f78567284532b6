"""Conversions to a model that Hugging Face's `from_pretrained` loads.

These are safetensors, with `config.json` and the files of the tokenizer beside them.
The configuration is that of `--config`, or of a source that has one. What the
conversion changes is changed in it: the type of the values, and the quantization that
they no longer have.

Where the configuration says that the output is the embedding (`tie_word_embeddings`),
the tensor of the output is left out, if it has the same values.
"""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import source_files
from elastic_ckpt.universal.formats.hugging_face import CONFIG
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.writing.conversion import Conversion, config_directory
from elastic_ckpt.universal.writing.safetensors_destination import (
    SafetensorsDestination,
)
from elastic_ckpt.universal.writing.writer import Written

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
_TIED = "tie_word_embeddings"
_OUTPUT = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


class HuggingFaceDestination(SafetensorsDestination):
    """See `Destination`.

    Raises:
      ConfigError: if there is no configuration, or the output is missing.
    """

    def __init__(self, conversion: Conversion) -> None:
        job = conversion.job
        self._model = config_directory(job.config or job.source)
        self._config = source_files.read_json(self._model / CONFIG)
        is_tied = self._config.get(_TIED)
        self._tied: tuple[TargetTensor, TargetTensor] | None = None
        named = {target.name: target for target in conversion.targets}
        embedding = [each for name, each in named.items() if name.endswith(_EMBEDDING)]
        if is_tied is True and _OUTPUT in named and len(embedding) == 1:
            self._tied = named[_OUTPUT], embedding[0]
            conversion.targets.remove(named[_OUTPUT])
        if is_tied is False and embedding and _OUTPUT not in named:
            raise errors.ConfigError(
                f"{self._model / CONFIG} says {_TIED}: false, and no"
                f" {_OUTPUT} is made; correct one of them, otherwise the output of the"
                " model would be random"
            )
        super().__init__(conversion)

    def others(self) -> Mapping[str, bytes]:
        """See `SafetensorsDestination`."""
        sizes: collections.Counter[str] = collections.Counter()
        for target in self.conversion.targets:
            sizes[target.dtype.name] += target.num_bytes
        floats = {name: size for name, size in sizes.items() if "float" in name}
        # Quantized values have a byte at most.
        is_quantized = any(
            target.dtype.itemsize == 1 and target.dtype.kind != "b"
            for target in self.conversion.targets
        )
        config = self._config
        if floats and not is_quantized:
            dtype = max(floats, key=lambda name: floats[name])
            config = _changed(config, dtype=dtype)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        copied = dict(_copied(self._model))
        return {**copied, CONFIG: text.encode() + b"\n"}

    def commit(self, attempt: str, contents: Written) -> None:
        """See `Destination`.

        Raises:
          CheckpointError: if the output is not the embedding.
        """
        if self._tied is not None:
            self._check_tied(*self._tied)
        super().commit(attempt, contents)

    def _check_tied(self, output: TargetTensor, embedding: TargetTensor) -> None:
        is_equal = output.shape == embedding.shape and output.dtype == embedding.dtype
        for box in self.conversion.boxes_of(embedding) if is_equal else ():
            needed = {output: [box], embedding: [box]}
            read = self.conversion.read(needed, memory=ReusedMemory(0))
            one, other = (values.tobytes() for _, _, values in read)
            is_equal = is_equal and one == other
        if not is_equal:
            raise errors.CheckpointError(
                f"{self._model / CONFIG} says {_TIED}: true, but"
                f" {output.name} differs from {embedding.name}; set it to false there,"
                " and convert again"
            )


def _copied(model: epath.Path) -> Iterator[tuple[str, bytes]]:
    # The files of the tokenizer and of generation: names and contents.
    for each in sorted(model.iterdir()):
        path = pathlib.PurePath(each.name)
        is_copied = any(map(path.match, _COPIED)) and not each.is_dir()
        if is_copied and path.suffix not in _PROGRAMS:
            yield each.name, each.read_bytes()


def _changed(fields: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    # The configuration of a model whose tensors are of a dtype, and not quantized.
    made = dict(fields)
    made.pop("quantization_config", None)
    keys = {"dtype", "torch_dtype"}
    for key in keys.intersection(made) or {"dtype"}:
        made[key] = dtype
    for key, each in made.items():
        # Models of several parts have a configuration of each.
        if isinstance(each, dict) and keys.intersection(each):
            made[key] = _changed(each, dtype=dtype)
    return made
