"""Conversions to Orbax: a step of persistent storage, with our manifest and digests.

The chunks of all arrays lie one after another in files of the store of one host:

    <unfinished>/state/ocdbt.process_<host>/d/00000

To commit, the index of the store is written, and the step is committed as all steps are
(see `tiers.persistent.upload`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from elastic_ckpt.checkpoint import structure
from elastic_ckpt.checkpoint.host.trees import AbstractArray
from elastic_ckpt.checkpoint.structure import StepDescription
from elastic_ckpt.core import errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import (
    Contents,
    Holder,
    Host,
    Leaf,
    Manifest,
    Parts,
    write_manifest,
)
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.persistent import claims, ocdbt, upload
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.writing import files, ocdbt_index
from elastic_ckpt.universal.writing.conversion import Conversion
from elastic_ckpt.universal.writing.files import File, Needed, Write
from elastic_ckpt.universal.writing.ocdbt_index import Extent
from elastic_ckpt.universal.writing.writer import Destination, Written

_HOST = Host(id="convert-0", number=0, domains={})
# Its name is known before the attempt.
_SAVE = ""
_STORE = ocdbt.store_name(_HOST.id, _SAVE)
_VALUES = "d"
# An index of a list.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")


class OrbaxDestination(Destination):
    """See `Destination`.

    Raises:
      CheckpointError: if the target is not the directory of a step, one target's name
        is that of a tree with another, or a list has keys that are no numbers.
    """

    def __init__(self, conversion: Conversion) -> None:
        super().__init__(conversion)
        name = self.target.name
        if not name.isdecimal() or str(int(name)) != name:
            raise errors.CheckpointError(
                f"{self.target} is not the directory of a step, whose name is its"
                f" number; convert to {self.target / '0'}"
            )
        self._root = PersistentRoot.from_path(self.target.parent)
        leaves = {leaf.path: leaf for leaf in self._saved("0").contents.leaves}
        self._leaves = {
            target.name: leaves[self._path(target)] for target in conversion.targets
        }
        # The values of the store by their keys, and the metadata among them.
        self._extents: dict[str, Extent] = {}
        self._metadata: dict[str, list[tuple[int, bytes]]] = {}
        self.files = self._planned()

    def head(self, file: File) -> Iterable[Write]:
        """See `Destination`."""
        name = file.name.partition(f"{_STORE}/")[2]
        for offset, content in self._metadata.get(name, ()):
            yield files.of_bytes(content, offset)

    def writes(
        self, file: File, target: TargetTensor, box: Box, values: np.ndarray
    ) -> Iterable[Write]:
        """See `Destination`."""
        del file
        offset = self._extents[ocdbt.key(self._leaves[target.name], box)].offset
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        yield Write(content, offset)
        checksum = stored_part.checksum(content)
        yield files.of_bytes(checksum, offset + content.nbytes)

    def directory(self, attempt: str) -> epath.Path:
        """See `Destination`."""
        return self._root.unfinished(self._id(attempt))

    def make_room(self) -> bool:
        """See `Destination`.

        Raises:
          CheckpointError: if there are other steps.
        """
        step = self._id("").step
        others = [each for each in self._root.steps() if each != step]
        if others:
            raise errors.CheckpointError(
                f"{self._root.path} has steps already"
                f" ({errors.first_of(map(str, others))}), and a converted step is the"
                " first of a run; convert to another directory"
            )
        if self._root.is_committed(step):
            return False
        for each in self._root.leftovers():
            if each.step == step:
                storage.remove(each.path)
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No run writes to the directory of the step, too; see `Destination`."""
        writer = claims.Writer(self._root.path)
        with super().alone(), contextlib.closing(writer):
            writer.check()
            yield

    def commit(self, attempt: str, contents: Written) -> None:
        """See `Destination`."""
        saved = self._saved(attempt)
        directory = self.directory(attempt)
        numbers = {leaf.path: n for n, leaf in enumerate(saved.contents.leaves)}
        digests = {
            (name, each.offset): bytes.fromhex(each.digest)
            for name, held in contents.items()
            for each in held
        }
        rows = []
        for file in self.files:
            for target, boxes in file.parts.items():
                leaf = self._leaves[target.name]
                for box in boxes:
                    offset = self._extents[ocdbt.key(leaf, box)].offset
                    rows.append((numbers[leaf.path], box, digests[file.name, offset]))
        if self._extents:
            store = directory / self.conversion.tree / _STORE
            ocdbt_index.write(store, self._extents)
        manifest = Manifest(
            run=saved.run,
            step_id=saved.step_id,
            contents=saved.contents,
            holders=(Holder(_HOST, "persistent"),),
            parts=Parts.of_rows(rows, saved.contents),
        )
        write_manifest(directory, manifest)
        chunks = {leaf.path: leaf.chunk for leaf in saved.contents.leaves}
        texts = StepDescription.from_contents(saved.contents).files(chunks)
        orbax_files = {path: text.encode() for path, text in texts.items()}
        upload.commit(self._root, saved, hosts=[_HOST.id], orbax_files=orbax_files)

    def _planned(self) -> list[File]:
        listed = []
        parts: dict[TargetTensor, list[Box]] = {}
        conversion = self.conversion
        end = 0
        for target in conversion.targets:
            leaf = self._leaves[target.name]
            for number, box in enumerate(conversion.boxes_of(target)):
                size = box.volume * target.dtype.itemsize + layout.CHECKSUM_BYTES
                if end and end + size > self.most_unit_bytes:
                    listed.append(self._file(len(listed), parts))
                    parts, end = {}, 0
                file = f"{_VALUES}/{len(listed):05d}"
                if not number:
                    head = ocdbt.metadata_file(leaf)
                    self._metadata.setdefault(file, []).append((end, head))
                    key = ocdbt.array_prefix(leaf.name) + ocdbt.METADATA
                    self._extents[key] = Extent(file, end, len(head))
                    end += len(head)
                parts.setdefault(target, []).append(box)
                self._extents[ocdbt.key(leaf, box)] = Extent(file, end, size)
                end += size
        return [*listed, self._file(len(listed), parts)] if parts else listed

    def _file(self, number: int, parts: Needed) -> File:
        store = f"{self.conversion.tree}/{_STORE}"
        return File(f"{store}/{_VALUES}/{number:05d}", parts)

    def _path(self, target: TargetTensor) -> str:
        # In manifests.
        tree, name = self.conversion.tree, target.name
        return f"{tree}/{name}" if name else tree

    def _id(self, attempt: str) -> StepId:
        return StepId(int(self.target.name), attempt)

    def _saved(self, attempt: str) -> upload.UploadedStep:
        conversion = self.conversion
        leaves = sorted(
            (
                Leaf(
                    path=self._path(target),
                    shape=target.shape,
                    dtype=target.dtype.name,
                    chunk=conversion.chunk_of[target.name],
                )
                for target in conversion.targets
            ),
            key=lambda leaf: leaf.path,
        )
        tree = _with_lists(_tree(conversion.targets), "", conversion.lists)
        contents = Contents(
            leaves=tuple(leaves),
            time_ms=int(attempt),
            trees=structure.to_json({conversion.tree: tree}),
        )
        return upload.UploadedStep(
            run=f"converted-{attempt}",
            step_id=self._id(attempt),
            contents=contents,
            stores=_SAVE,
        )


def _tree(targets: Sequence[TargetTensor]) -> Any:
    root: dict[str, Any] = {}
    for target in targets:
        *above, last = ("", *target.name.split("/"))[bool(target.name) :]
        node: Any = root
        for key in above:
            node = node.setdefault(_key(key), {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or _key(last) in node:
            raise errors.CheckpointError(
                f"{target.name} lies below, or above, another target, which is an array"
                " and has no parts; rename one of them in the layout"
            )
        node[_key(last)] = _leaf(target)
    return root


def _with_lists(tree: Any, path: str, lists: Sequence[str]) -> Any:
    # Trees of Orbax have None for elements without leaves.
    if not isinstance(tree, dict):
        return tree
    made = {
        key: _with_lists(node, f"{path}/{key}" if path else key, lists)
        for key, node in tree.items()
    }
    if path not in lists:
        return made
    for key in made:
        if not _NUMBER.fullmatch(key):
            raise errors.CheckpointError(
                f"{path} is listed in `lists` of the layout, but has the key {key!r},"
                " which is no number below 10000; remove it from `lists`"
            )
    return [made.get(str(at)) for at in range(1 + max(map(int, made)))]


def _key(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _leaf(target: TargetTensor) -> Any:
    # One of NumPy if JAX would narrow it.
    if jax.dtypes.canonicalize_dtype(target.dtype) != target.dtype:
        return AbstractArray(shape=target.shape, dtype=target.dtype)
    return jax.ShapeDtypeStruct(target.shape, target.dtype)
