"""Converts to safetensors, and to a model that `from_pretrained` loads.

    model.safetensors                     if all tensors fit into one file; otherwise:
    model-00001-of-00003.safetensors      one of the files
    model.safetensors.index.json          an index that maps each tensor to its file

Tensors are assigned to files in source order. Within a file, tensors with wider
elements come first, so that each tensor starts at a multiple of its element size.

A rename makes a directory visible. Object stores cannot rename directories: there, the
index commits the files, or a single file commits itself. A file next to the directory,
`<target>.unfinished`, shows that a conversion is writing the directory or was killed.

A Hugging Face model also has `config.json` and the tokenizer files. The configuration
comes from `--config` or, by default, from the source. The conversion updates the
configured dtype and removes quantization settings that no longer apply. If the
configuration ties the output to the embedding (`tie_word_embeddings`), the output
tensor must have the same values and is omitted.

Spec: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import collections
import json
import operator
import os
import pathlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import digest, errors, storage
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats import files, safetensors
from elastic_ckpt.universal.formats.weights import CONFIG
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading.engine import Buffer
from elastic_ckpt.universal.writing.convert import (
    Conversion,
    Destination,
    config_directory,
)

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"
# The files to copy with a model. Code is not copied.
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
# Suffixes of quantized weights that are packed into wider integers.
_PACKED = ("qweight", "weight_packed")
_TIED = "tie_word_embeddings"
_OUTPUT = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


class SafetensorsFiles(Destination):
    """See `Destination`."""

    # The maximum size of the values in a file. A larger tensor gets its own file.
    most_file_bytes = 5 * 10**9

    def __init__(self, conversion: Conversion) -> None:
        super().__init__(conversion)
        groups: list[list[TargetTensor]] = [[]]
        num_bytes = 0
        for target in conversion.targets:
            num_bytes += target.num_bytes
            if groups[-1] and num_bytes > self.most_file_bytes:
                groups.append([])
                num_bytes = target.num_bytes
            groups[-1].append(target)
        names = [_ONE_FILE]
        if len(groups) > 1:
            numbers, last = range(1, len(groups) + 1), f"{len(groups):05d}.safetensors"
            names = [f"model-{number:05d}-of-{last}" for number in numbers]
        self._files = dict(zip(names, groups, strict=True))
        # Before anything is written because the format may not support a dtype.
        self._headers = {name: _header(group) for name, group in self._files.items()}
        self._is_local = storage.is_local(self.target)
        self._unfinished = self.target.parent / f"{self.target.name}.unfinished"
        self._directory = self._unfinished if self._is_local else self.target

    def beside(self) -> Mapping[str, bytes]:
        """The contents of all other files, keyed by file name."""
        return {}

    def write(self) -> Generator[int]:
        """See `Destination`."""
        is_whole = any((self.target / name).exists() for name in (_ONE_FILE, _INDEX))
        if is_whole:
            storage.remove(self._unfinished)
        is_left = not (self._is_local or is_whole) and self._unfinished.exists()
        if self.target.exists() and not is_left:
            raise self.exists_already()
        storage.remove(self._directory)
        if not self._is_local:
            storage.write_atomic(self._unfinished, b"")
        yield 0
        for name, content in self.beside().items():
            storage.write_atomic(self._directory / name, content)
        for name in self._files:
            yield from self._write(name)
        self._conversion.reader.checks.finish()
        if len(self._files) > 1:
            files = {
                target.name: file
                for file, group in self._files.items()
                for target in group
            }
            size = {"total_size": self._conversion.num_bytes}
            index = {"metadata": size, "weight_map": dict(sorted(files.items()))}
            storage.write_atomic(self._directory / _INDEX, _json(index))
        if self._is_local:
            storage.rename(self._directory, self.target)
        else:
            storage.remove(self._unfinished)

    def _write(self, name: str) -> Iterator[int]:
        header, starts = self._headers[name]
        path = self._directory / name
        with (
            storage.atomic_path(path) as temporary,
            open(temporary, "r+b") as file,
            futures.ThreadPoolExecutor(1) as pool,
        ):
            file.write(header)
            synced = pool.submit(_sync, file.fileno())
            for batch in self._conversion.read(self._files[name]):
                for each in batch:
                    for row, offset in _rows(each):
                        file.seek(starts[each.target] + offset)
                        file.write(row.data)
                file.flush()
                synced.result()
                synced = pool.submit(_sync, file.fileno())
                yield sum(each.values.nbytes for each in batch)
            synced.result()


class HuggingFaceModel(SafetensorsFiles):
    """See `Destination`.

    Raises:
      ConfigError: if there is no configuration, or the output tensor is missing.
    """

    def __init__(self, conversion: Conversion) -> None:
        job = conversion.job
        self._model = config_directory(job.config or job.source)
        self._config = files.read_json(self._model / CONFIG)
        is_tied = self._config.get(_TIED)
        self._tied: tuple[TargetTensor, TargetTensor] | None = None
        named = {target.name: target for target in conversion.targets}
        embedding = [each for name, each in named.items() if name.endswith(_EMBEDDING)]
        if is_tied is True and _OUTPUT in named and len(embedding) == 1:
            self._tied = named[_OUTPUT], embedding[0]
            conversion.targets.remove(named[_OUTPUT])
        if is_tied is False and embedding and _OUTPUT not in named:
            raise errors.ConfigError(
                f"{self._model / CONFIG} sets {_TIED}: false, but the rules do not"
                f" produce {_OUTPUT}, so the output layer would be randomly"
                " initialized; correct the configuration or the rules"
            )
        super().__init__(conversion)

    def beside(self) -> Mapping[str, bytes]:
        """See `SafetensorsFiles`.

        Raises:
          CheckpointError: if the output differs from the embedding.
        """
        if self._tied is not None:
            self._check_tied(*self._tied)
        sizes: collections.Counter[str] = collections.Counter()
        for target in self._conversion.targets:
            sizes[target.dtype.name] += target.num_bytes
        floats = {name: size for name, size in sizes.items() if "float" in name}
        # Quantized values that are not packed have at most one byte each.
        is_quantized = any(
            (target.dtype.itemsize == 1 and target.dtype.kind != "b")
            or target.name.endswith(_PACKED)
            for target in self._conversion.targets
        )
        config = self._config
        if floats and not is_quantized:
            dtype = max(floats, key=lambda name: floats[name])
            config = _changed(config, dtype=dtype)
        return {**dict(_copied(self._model)), CONFIG: _json(config)}

    def _check_tied(self, output: TargetTensor, embedding: TargetTensor) -> None:
        is_equal = output.shape == embedding.shape and output.dtype == embedding.dtype
        both = [output, embedding] if is_equal else []
        found = {
            (each.box, digest.values_digest(each.values))
            for batch in self._conversion.read(both, like=embedding)
            for each in batch
        }
        if not is_equal or len(found) > len({box for box, _ in found}):
            raise errors.CheckpointError(
                f"{self._model / CONFIG} sets {_TIED}: true, but"
                f" {output.name} differs from {embedding.name}; set {_TIED} to false"
                " and convert again"
            )


def _header(group: Iterable[TargetTensor]) -> tuple[bytes, dict[TargetTensor, int]]:
    # A file's header and the position of each tensor in the file. Hugging Face's
    # transformers library requires `format`.
    fields: dict[str, object] = {_METADATA: {"format": "pt"}}
    offsets: dict[TargetTensor, int] = {}
    end = 0
    for target in sorted(group, key=lambda each: (-each.dtype.itemsize, each.name)):
        # Half a surrogate pair cannot be encoded in UTF-8.
        is_text = target.name.encode(errors="ignore").decode() == target.name
        if target.name == _METADATA or not is_text:
            raise errors.CheckpointError(
                f"safetensors cannot store a tensor named {target.name!r}; rename it"
                " in the layout"
            )
        offsets[target], end = end, end + target.num_bytes
        fields[target.name] = {
            "dtype": safetensors.dtype_name(target.dtype),
            "shape": list(target.shape),
            "data_offsets": [offsets[target], end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, {target: len(header) + start for target, start in offsets.items()}


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _sync(descriptor: int) -> None:
    # Frees pages for later writes because allocating fresh pages takes longer than
    # copying.
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _rows(part: Buffer) -> Iterator[tuple[np.ndarray, int]]:
    # Yields the pieces of a box that are contiguous in the tensor, and their offsets.
    target, box, values = part.target, part.box, part.values
    strides = row_major(target.shape, target.dtype.itemsize)
    first = sum(map(operator.mul, box.start, strides))
    # The dims after `dim` are whole, so the elements along `dim` are contiguous.
    dim = len(target.shape)
    while dim and (dim == len(target.shape) or box.shape[dim] == target.shape[dim]):
        dim -= 1
    rows = np.ascontiguousarray(values).reshape(*box.shape[:dim], -1).view(np.uint8)
    for index in np.ndindex(*box.shape[:dim]):
        yield rows[index], first + sum(map(operator.mul, index, strides))


def _copied(model: epath.Path) -> Iterator[tuple[str, bytes]]:
    # Yields the names and contents of the files to copy.
    for each in sorted(model.iterdir()):
        path = pathlib.PurePath(each.name)
        is_copied = any(map(path.match, _COPIED)) and not each.is_dir()
        if is_copied and path.suffix not in _PROGRAMS:
            yield each.name, each.read_bytes()


def _changed(fields: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    # The model's configuration with this dtype and without quantization.
    made = dict(fields)
    made.pop("quantization_config", None)
    keys = {"dtype", "torch_dtype"}
    for key in keys.intersection(made) or {"dtype"}:
        made[key] = dtype
    for key, each in made.items():
        # A model with multiple parts has a configuration for each part.
        if isinstance(each, dict) and keys.intersection(each):
            made[key] = _changed(each, dtype=dtype)
    return made
