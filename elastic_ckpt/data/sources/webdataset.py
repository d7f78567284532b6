"""WebDataset: tar archives whose consecutive members of one name are a sample.

`0001.jpg` and `0001.txt` are the fields `jpg` and `txt` of the sample `0001`. Finding
the samples requires a pass over the headers of the members (`offset_index`). It refuses
archives of which a file would be lost: two of one field, or of one sample in two
places, links, and what follows the end of the archive.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import tarfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO, TypeAlias

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files, offset_index, source

# The field with the name of a sample.
KEY = "__key__"
_CHUNK_BYTES = 2**20
_FAILURES = (tarfile.TarError, EOFError, UnicodeDecodeError, ValueError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebDataset(source.RawFiles):
    """Tar archives in WebDataset's form as a source.

    An element has the content of each file of a sample, bytes, by the end of its name
    after the first dot (`jpg`, `seg.png`), and `__key__`, what is before: decode them
    in a function of your own. Archives must not be compressed.

    Attributes:
      files: the paths or URIs of the archives.
      columns: the fields to read; all if it is empty.
    """

    file_type = "webdataset"
    _record_name = "sample"

    def index(self, file: str) -> source.FileIndex:
        """The offsets of the blocks, from the cache or from a pass over the file."""
        return offset_index.index("webdataset", file, functools.partial(_walk, file))

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        content = io.BytesIO(self._content(file, block))
        return self._block(file, block, _records(content, self.files[file]))

    def _element(self, record: source.Element, place: str) -> source.Element:
        names = self.columns or tuple(record)
        source.check_columns(place, names, sorted(record), what="field")
        return {name: record[name] for name in names}


def _records(stream: BinaryIO, file: str) -> Iterator[source.Element]:
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for key, members in _samples(archive, file):
                # The sample before damage may lack files.
                fields = {field: _content(archive, member) for member, field in members}
                yield {KEY: key, **fields}
    except _FAILURES as error:
        raise source.LostError(
            f"{error}; later samples of this block cannot be found"
        ) from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    content = opened.read() if opened is not None else b""
    if len(content) < member.size:
        raise EOFError(f"{member.name} is cut short")
    return content


def _walk(file: str, stream: BinaryIO, num_bytes: int) -> Iterator[int]:
    keys: set[str] = set()
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for key, members in _samples(archive, file):
                (first, _), *_ = members
                if key in keys:
                    raise errors.DataError(
                        f"{file}, byte {first.offset}: files of the sample {key!r}"
                        " again, apart from those before; write the archive again with"
                        " the files of a sample next to each other, and another name"
                        " for each sample"
                    )
                keys.add(key)
                yield first.offset
            end = archive.offset
            _check_rest(archive, file)
    except _FAILURES as error:
        raise errors.DataError(
            f"{file}: not a complete tar archive ({error}); {files.RESTORE}"
        ) from None
    # Two blocks of zeros end an archive.
    if num_bytes < end + 2 * tarfile.BLOCKSIZE:
        raise errors.DataError(
            f"{file}: cut short after {num_bytes} bytes, not a complete tar archive;"
            " restore it from a copy"
        )


def _check_rest(archive: tarfile.TarFile, file: str) -> None:
    # After its end an archive is filled up with zeros.
    stream = archive.fileobj
    assert stream is not None
    stream.seek(archive.offset)
    while content := stream.read(_CHUNK_BYTES):
        if more := content.lstrip(b"\0"):
            raise errors.DataError(
                f"{file}: the archive ends at byte {archive.offset}, and more follows"
                f" at byte {stream.tell() - len(more)}; if archives were joined by cat,"
                " name each of them, or join them by `tar --concatenate`"
            )


# A file in an archive, and its field.
_Member: TypeAlias = tuple[tarfile.TarInfo, str]


def _samples(
    archive: tarfile.TarFile, file: str
) -> Iterator[tuple[str, Iterator[_Member]]]:
    # The samples by their keys.
    named = ((member, _named(member, file)) for member in _members(archive))
    members = ((member, *name) for member, name in named if name is not None)
    for key, each in itertools.groupby(members, key=lambda member: member[1]):
        yield key, _fields(each, file)


def _fields(
    members: Iterable[tuple[tarfile.TarInfo, str, str]], file: str
) -> Iterator[_Member]:
    fields = {KEY}
    for member, key, field in members:
        if field in fields:
            raise errors.DataError(
                f"{file}, byte {member.offset}: {member.name!r} is the field {field!r}"
                f" of the sample {key!r} again (in small letters); rename one of the"
                " files, and write the archive again"
            )
        fields.add(field)
        yield member, field


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    # A damaged size could lead back to a header that was read before, endlessly.
    last = -1
    for member in archive:
        if member.size < 0 or member.offset <= last:
            raise tarfile.ReadError(f"the size of {member.name!r} is damaged")
        last = member.offset
        yield member
    # `tarfile` takes a header that it cannot read for the end.
    stream = archive.fileobj
    assert stream is not None
    stream.seek(archive.offset)
    if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"the header at byte {archive.offset} is damaged")


def _named(member: tarfile.TarInfo, file: str) -> tuple[str, str] | None:
    # The key and the field of a file; None if it is of no sample.
    directory, slash, name = member.name.rpartition("/")
    key, dot, field = name.partition(".")
    if member.isdir() or not dot or not key:
        return None
    if not member.isfile():
        raise errors.DataError(
            f"{file}, byte {member.offset}: {member.name!r} is a link or a device,"
            " without content of its own; write the archive again by `tar --dereference"
            " --hard-dereference`"
        )
    return f"{directory}{slash}{key}", field.lower()
