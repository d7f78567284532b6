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
from collections.abc import Mapping

from elastic_ckpt.core import errors
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.writing import hugging_face
from elastic_ckpt.universal.writing.conversion import Conversion
from elastic_ckpt.universal.writing.safetensors_destination import (
    SafetensorsDestination,
)
from elastic_ckpt.universal.writing.writer import Written

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
        self._model = hugging_face.directory(job.config or job.source)
        self._config = hugging_face.config(self._model)
        is_tied = self._config.get(_TIED)
        self._tied: tuple[TargetTensor, TargetTensor] | None = None
        named = {target.name: target for target in conversion.targets}
        embedding = [each for name, each in named.items() if name.endswith(_EMBEDDING)]
        if is_tied is True and _OUTPUT in named and len(embedding) == 1:
            self._tied = named[_OUTPUT], embedding[0]
            conversion.targets.remove(named[_OUTPUT])
        if is_tied is False and embedding and _OUTPUT not in named:
            raise errors.ConfigError(
                f"{self._model / hugging_face.CONFIG} says {_TIED}: false, and no"
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
            config = hugging_face.changed(config, dtype=dtype)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        copied = dict(hugging_face.copied(self._model))
        return {**copied, hugging_face.CONFIG: text.encode() + b"\n"}

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
                f"{self._model / hugging_face.CONFIG} says {_TIED}: true, but"
                f" {output.name} differs from {embedding.name}; set it to false there,"
                " and convert again: what is complete is kept"
            )
