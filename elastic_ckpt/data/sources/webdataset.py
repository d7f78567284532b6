"""WebDataset: tar archives in which consecutive files with the same name are a sample.

`0001.jpg` and `0001.txt` are the fields `jpg` and `txt` of the sample `0001`. An
archive is rejected if a file would be lost: if a sample repeats a field or is in two
places, or if the archive contains a link or has anything after its end.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import source

# The field with a sample's name.
KEY = "__key__"
_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebDataset(source.WalkedFiles):
    """Tar archives in WebDataset format as a source.

    An element maps the part of each file name after the first dot (`jpg`, `seg.png`) to
    the file's bytes, and `__key__` to the part before the dot. Decode the bytes in your
    own function. Archives must not be compressed.

    Attributes:
      files: the paths or URIs of the archives.
      columns: the fields to read; empty reads all.
    """

    file_type = "webdataset"

    def _records(
        self, file: str, stream: BinaryIO, *, is_whole: bool
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        keys: set[str] = set()
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                members = _members(archive, file, stream)
                for key, group in itertools.groupby(members, lambda each: each[1]):
                    fields = {KEY: os.fsencode(key)}
                    some = list(group)
                    for member, _, field in some:
                        if key in keys or field in fields:
                            raise errors.DataError(
                                f"{file}, byte {member.offset}: {member.name!r} repeats"
                                " a field of its sample (ignoring case), or belongs to"
                                " an earlier sample; rewrite the archive so that the"
                                " files of each sample are adjacent and have unique"
                                " names"
                            )
                        stream.seek(member.offset_data)
                        fields[field] = stream.read(member.size)
                    keys.add(key)
                    yield some[0][0].offset, fields
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise source.LostError(error) from None
        # Two blocks of zeros end an archive.
        least = archive.offset + 2 * tarfile.BLOCKSIZE
        if is_whole and stream.seek(0, os.SEEK_END) < least:
            raise source.LostError(f"it is truncated at byte {archive.offset}")

    def _element(self, record: dict[str, bytes], place: str) -> source.Element:
        names = self.columns or tuple(record)
        source.check_columns(place, names, sorted(record), what="field")
        element: source.Element = {name: record[name] for name in names}
        if KEY in element:
            element[KEY] = os.fsdecode(element[KEY])
        return element


def _members(
    archive: tarfile.TarFile, file: str, stream: BinaryIO
) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    # The samples' files, each with its key and field.
    last = -1
    for member in archive:
        # A damaged size could lead back to an earlier header, in an endless loop.
        if member.size < 0 or member.offset <= last:
            raise tarfile.ReadError(f"the size of {member.name!r} is damaged")
        last = member.offset
        directory, slash, name = member.name.rpartition("/")
        key, dot, field = name.partition(".")
        if member.isdir() or not dot or not key:
            continue
        if not member.isfile() or member.issparse():
            raise errors.DataError(
                f"{file}, byte {member.offset}: {member.name!r} is a link or a device"
                " without content, or a sparse file; rewrite the archive with"
                " `tar --dereference --hard-dereference`"
            )
        yield member, f"{directory}{slash}{key}", field.lower()
    # `tarfile` mistakes an unreadable header for the end, which must be zeros.
    end = stream.seek(archive.offset)
    while content := stream.read(_CHUNK_BYTES):
        if content.strip(b"\0"):
            raise tarfile.ReadError(
                f"the archive ends at byte {end}, but more data follows; join archives"
                " with `tar --concatenate`"
            )
