"""Conversions to Orbax: a step of persistent storage, with our manifest and digests.

The chunks of all arrays lie one after another in files of the store of one host:

    <unfinished>/state/ocdbt.process_<host>/d/00000

To commit, the index of the store is written, and the step is committed as all steps are
(see `tiers.persistent.commit`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, manifest_file
from elastic_ckpt.steps.manifest import Fragment, Fragments, Host, Manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import stored_part, zarr_array
from elastic_ckpt.tiers.persistent import commit, ocdbt, upload, writer, writers
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.writing import converted_step, files, ocdbt_index
from elastic_ckpt.universal.writing.conversion import Conversion
from elastic_ckpt.universal.writing.files import File, Needed, Piece
from elastic_ckpt.universal.writing.ocdbt_index import Extent
from elastic_ckpt.universal.writing.writer import Contents, Destination

_HOST = Host(id="convert-0", number=0, domains={})
_STORE = ocdbt.store_name(_HOST.id, "")
_VALUES = "d"


class OrbaxDestination(Destination):
    """See `Destination`.

    Raises:
      CheckpointError: if the target is not the directory of a step.
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
        saved = self._saved("0")
        self._arrays = {
            target.name: saved.arrays[self._path(target)]
            for target in conversion.targets
        }
        # The values of the store by their keys, and the metadata among them.
        self._extents: dict[str, Extent] = {}
        self._metadata: dict[str, list[tuple[int, bytes]]] = {}
        self.files = self._planned()

    def head(self, file: File) -> Iterable[Piece]:
        """See `Destination`."""
        name = file.name.partition(f"{_STORE}/")[2]
        for offset, content in self._metadata.get(name, ()):
            yield files.of_bytes(content, offset)

    def pieces(
        self, file: File, target: TargetTensor, box: Box, values: np.ndarray
    ) -> Iterable[Piece]:
        """See `Destination`."""
        del file
        offset = self._extents[self._arrays[target.name].key(box)].offset
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        yield Piece(content, offset)
        checksum = stored_part.checksum(content)
        yield files.of_bytes(checksum, offset + content.nbytes)

    def directory(self, attempt: str) -> epath.Path:
        """See `Destination`."""
        return self._root.unfinished(self._id(attempt))

    def is_committed(self, *, is_attempted: bool) -> bool:
        """See `Destination`.

        Raises:
          CheckpointError: if there are other steps.
        """
        del is_attempted
        step = self._id("").step
        others = [each for each in self._root.steps() if each != step]
        if others:
            raise errors.CheckpointError(
                f"{self._root.path} has steps already"
                f" ({errors.first_of(map(str, others))}), and a converted step is the"
                " first of a run; convert to another directory"
            )
        return self._root.is_committed(step)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No run writes to the directory of the step, too; see `Destination`."""
        advice = "wait for it or stop it, or convert into another directory"
        with (
            storage.exclusive_lock(self._root.path / writers.LOCK),
            writer.Writer(self._root.path, advice=advice),
        ):
            yield

    def commit(self, attempt: str, contents: Contents) -> None:
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
                array = self._arrays[target.name]
                for box in boxes:
                    offset = self._extents[array.key(box)].offset
                    rows.append(
                        Fragment(
                            leaf=numbers[self._path(target)],
                            box=box,
                            digest=digests[file.name, offset],
                            file=f"{array.checkpointable}/{_STORE}//{array.key(box)}",
                            offset=0,
                            stored_bytes=layout.num_bytes(box, target.dtype.name),
                        )
                    )
        if self._extents:
            store = directory / self.conversion.tree / _STORE
            ocdbt_index.write(store, self._extents)
        manifest = Manifest(
            run=saved.run,
            step=saved.step_id.step,
            save=saved.step_id.save,
            host=_HOST,
            contents=saved.contents,
            fragments=Fragments.from_rows(rows, contents=saved.contents),
            component_files=(),
        )
        manifest_file.write(directory, manifest)
        commit.commit(
            self._root,
            saved,
            hosts=[_HOST.id],
            orbax_files=converted_step.orbax_files(
                saved, self.conversion.tree, self.conversion.chunk_of
            ),
        )

    def _planned(self) -> list[File]:
        listed = []
        parts: dict[TargetTensor, list[Box]] = {}
        conversion = self.conversion
        end = 0
        for target in conversion.targets:
            array = self._arrays[target.name]
            for number, box in enumerate(conversion.boxes_of(target)):
                size = box.volume * target.dtype.itemsize + layout.CHECKSUM_BYTES
                if end and end + size > self.most_unit_bytes:
                    listed.append(self._file(len(listed), parts))
                    parts, end = {}, 0
                file = f"{_VALUES}/{len(listed):05d}"
                if not number:
                    head = zarr_array.metadata_file(
                        target.shape, target.dtype.name, array.chunk
                    )
                    self._metadata.setdefault(file, []).append((end, head))
                    key = array.prefix + zarr_array.METADATA
                    self._extents[key] = Extent(file, end, len(head))
                    end += len(head)
                parts.setdefault(target, []).append(box)
                self._extents[array.key(box)] = Extent(file, end, size)
                end += size
        return [*listed, self._file(len(listed), parts)] if parts else listed

    def _file(self, number: int, parts: Needed) -> File:
        store = f"{self.conversion.tree}/{_STORE}"
        return File(f"{store}/{_VALUES}/{number:05d}", parts)

    def _path(self, target: TargetTensor) -> str:
        return converted_step.leaf_path(self.conversion.tree, target.name)

    def _id(self, attempt: str) -> StepId:
        return StepId(int(self.target.name), attempt)

    def _saved(self, attempt: str) -> upload.UploadedStep:
        return converted_step.saved_step(
            self.conversion.targets,
            self.conversion.chunk_of,
            tree=self.conversion.tree,
            lists=self.conversion.lists,
            run=f"converted-{self.conversion.identity[:16]}",
            step_id=self._id(attempt),
        )
