"""Plans which file of a safetensors checkpoint has which tensors, and where.

    model.safetensors                     if all tensors fit into one file
    model-00001-of-00003.safetensors      otherwise, with
    model.safetensors.index.json          the file of each tensor

Tensors are dealt to files in their given order. Inside of a file those of wider
elements come first, so that each lies at a multiple of its element's size.

Spec: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import safetensors_file
from elastic_ckpt.universal.formats.safetensors_file import Span
from elastic_ckpt.universal.moves import TargetTensor

INDEX = "model.safetensors.index.json"
MOST_FILE_BYTES = 5 * 10**9
# A header of so many tensors is far below what readers accept.
_MOST_TENSORS = 100_000
_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file of the checkpoint.

    Attributes:
      name: in the checkpoint's directory.
      header: its first bytes.
      spans: the place of each tensor in the file, by name.
    """

    name: str
    header: bytes
    spans: Mapping[str, Span]

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return max((span.stop for span in self.spans.values()), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SafetensorsPlan:
    """The files of a checkpoint.

    Attributes:
      files: those that have tensors.
      index: the content of `INDEX`; None if there is one file.
    """

    files: tuple[PlannedFile, ...]
    index: bytes | None

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files)

    def files_of(self, host: int, *, num_hosts: int) -> list[PlannedFile]:
        """The files that a host writes; every file is that of one host.

        The largest files are dealt first, each to the host with the fewest bytes.

        Args:
          host: its number, from 0.
          num_hosts: hosts that write.
        """
        loads = [0] * num_hosts
        owned = []
        for file in sorted(self.files, key=lambda each: (-each.num_bytes, each.name)):
            owner = loads.index(min(loads))
            loads[owner] += file.num_bytes
            if owner == host:
                owned.append(file)
        return owned


def plan(
    tensors: Sequence[TargetTensor],
    *,
    most_file_bytes: int = MOST_FILE_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> SafetensorsPlan:
    """Plans the files of some tensors.

    Args:
      tensors: in the order in which they are dealt to files.
      most_file_bytes: of the values in a file; a larger tensor is alone in one.
      metadata: texts in the header of each file; by default `format` is `pt`, which
        Hugging Face's transformers require.

    Raises:
      CheckpointError: if there are no tensors, or a name that cannot be used.
      FormatError: if safetensors has no such dtype.
    """
    if not tensors:
        raise errors.CheckpointError(
            "there are no tensors to write; give rules that match some"
        )
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        counts = collections.Counter(names)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise errors.CheckpointError(
            f"several tensors have the same name ({errors.first_of(twice)}); rename"
            " all but one of each"
        )
    if _METADATA in names:
        raise errors.CheckpointError(
            f"a tensor is called {_METADATA}, as the texts of a header; rename it"
        )
    texts = {"format": "pt"} if metadata is None else dict(metadata)
    groups = list(_groups(tensors, most_file_bytes))
    files = tuple(
        _file(_name(number, len(groups)), group, texts)
        for number, group in enumerate(groups, start=1)
    )
    index = _index(files, sum(tensor.num_bytes for tensor in tensors))
    return SafetensorsPlan(files=files, index=index if len(files) > 1 else None)


def _groups(
    tensors: Sequence[TargetTensor], most_file_bytes: int
) -> Iterable[list[TargetTensor]]:
    group: list[TargetTensor] = []
    num_bytes = 0
    for tensor in tensors:
        full = num_bytes + tensor.num_bytes > most_file_bytes
        if group and (full or len(group) == _MOST_TENSORS):
            yield group
            group, num_bytes = [], 0
        group.append(tensor)
        num_bytes += tensor.num_bytes
    yield group


def _name(number: int, num_files: int) -> str:
    if num_files == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{num_files:05d}.safetensors"


def _file(
    name: str, tensors: Sequence[TargetTensor], metadata: Mapping[str, str]
) -> PlannedFile:
    ordered = sorted(tensors, key=lambda each: (-each.dtype.itemsize, each.name))
    fields: dict[str, object] = {_METADATA: metadata} if metadata else {}
    offset = 0
    offsets = []
    for tensor in ordered:
        fields[tensor.name] = {
            "dtype": safetensors_file.dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offsets.append(offset)
        offset += tensor.num_bytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return PlannedFile(
        name=name,
        header=header,
        spans={
            tensor.name: Span(
                dtype=tensor.dtype,
                shape=tensor.shape,
                start=len(header) + offset,
                stop=len(header) + offset + tensor.num_bytes,
            )
            for tensor, offset in zip(ordered, offsets, strict=True)
        },
    )


def _index(files: Sequence[PlannedFile], total_bytes: int) -> bytes:
    weight_map = {name: file.name for file in files for name in file.spans}
    content = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
