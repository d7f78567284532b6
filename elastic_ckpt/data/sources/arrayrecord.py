"""ArrayRecord files as one random-access list of records."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

import grain
from etils import epath

from elastic_ckpt.core import errors, storage


def find_files(patterns: str) -> tuple[str, ...]:
    """The files of comma-separated paths or globs, sorted within each.

    Raises:
      DataError: naming the pattern that matches nothing.
    """
    found: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = _matches(pattern)
        if not matches:
            raise errors.DataError(
                f"grain_train_files: {pattern} matches no file; write one with"
                " `elastic-ckpt data DIRECTORY FILE`, or set text_directory"
            )
        found += matches
    if not found:
        raise errors.DataError(
            "grain_train_files is empty; set it to the ArrayRecord files to train on"
        )
    return tuple(found)


class ArrayRecordFiles:
    """The records of several files in file order, as a Grain random-access source.

    An element is `(record number, record)`: the number counts over all files and names
    the record for the life of the files.

    Raises:
      DataError: if a file cannot be read as ArrayRecord, or no file holds a record.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = tuple(files)
        self.records_per_file = tuple(_count(file) for file in self._files)
        if not sum(self.records_per_file):
            raise errors.DataError(
                f"{', '.join(self._files)}: not one record; write them again with"
                " `elastic-ckpt data DIRECTORY FILE`"
            )
        filled = [
            file
            for file, count in zip(self._files, self.records_per_file, strict=True)
            if count
        ]
        self._records = grain.sources.ArrayRecordDataSource(filled)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        try:
            return index, self._records[index]
        except RuntimeError as error:
            place, first = 0, index
            while first >= self.records_per_file[place]:
                first -= self.records_per_file[place]
                place += 1
            raise errors.DataError(
                f"{self._files[place]}, record {first}: cannot be read ({error});"
                " restore the file from a copy"
            ) from None

    def __repr__(self) -> str:
        # Grain prints this in the warnings and errors of a pipeline.
        return f"ArrayRecordFiles(files={len(self._files)}, records={len(self)})"

    def identity(self) -> list[storage.Json]:
        """Name, size in bytes and record count of each file, in order."""
        return [
            [os.path.basename(file), epath.Path(file).stat().length, count]
            for file, count in zip(self._files, self.records_per_file, strict=True)
        ]


def _matches(pattern: str) -> list[str]:
    if storage.is_local(pattern):
        return sorted(glob.glob(os.path.expanduser(pattern)))
    path = epath.Path(pattern)
    return sorted(os.fspath(match) for match in path.parent.glob(path.name))


def _count(file: str) -> int:
    try:
        from array_record.python import array_record_module

        reader = array_record_module.ArrayRecordReader(file)
        count = reader.num_records()
        reader.close()
    except RuntimeError as error:
        raise errors.DataError(
            f"{file}: not a readable ArrayRecord file ({error or 'it is cut short'});"
            " restore it, or write it again with `elastic-ckpt data DIRECTORY FILE`"
        ) from None
    return count
