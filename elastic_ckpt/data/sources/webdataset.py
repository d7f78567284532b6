"""WebDataset: tar archives whose consecutive members of one name are a sample.

`0001.jpg` and `0001.txt` are the fields `jpg` and `txt` of the sample `0001`. Finding
the samples requires a pass over the headers of the members (`offset_index`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tarfile
from collections.abc import Generator, Iterator
from typing import BinaryIO, TypeAlias

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files, offset_index, runs, source

# The field with the name of a sample.
KEY = "__key__"
# Samples of a block.
_BLOCK_SAMPLES = 64
_FAILURES = (tarfile.TarError, EOFError, UnicodeDecodeError, ValueError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebDataset(runs.RunFiles):
    """Tar archives in WebDataset's form as a source; a block is 64 samples.

    An element has the content of each file of a sample, bytes, by the end of its name
    after the first dot (`jpg`, `seg.png`), and `__key__`, what is before: decode them
    in a function of your own. Archives must not be compressed.

    Attributes:
      files: the paths or URIs of the archives.
      columns: the fields to read; all if it is empty.
    """

    file_type = "webdataset"
    _record_name = "sample"
    _run_bytes = 4 * 2**20

    def index(self, file: str) -> source.FileIndex:
        """The offsets of the blocks, from the cache or from a pass over the file."""
        return offset_index.index("webdataset", file, functools.partial(_walk, file))

    def _records(
        self, file: str, offset: int, before: int
    ) -> Generator[tuple[source.Element, int, int]]:
        end = offset
        try:
            with _opened(file, offset) as archive:
                for key, members in itertools.islice(_samples(archive), before, None):
                    sample: source.Element = {KEY: key}
                    size = 0
                    for member, _, field in members:
                        opened = archive.extractfile(member)
                        content = opened.read() if opened is not None else b""
                        if len(content) < member.size:
                            raise EOFError(f"{member.name} is cut short")
                        sample[field] = content
                        size += member.size
                        # Of a sparse file there is less than its size.
                        end = archive.offset
                    yield sample, size, end
            raise EOFError("the archive ends before")
        except _FAILURES as error:
            # The sample before the damage may lack files.
            raise runs.LostError(
                f"{error}; later samples of this block cannot be found"
            ) from None

    def _element(self, record: source.Element, place: str) -> source.Element:
        if not self.columns:
            return record
        source.check_columns(place, self.columns, sorted(record), what="field")
        return {name: record[name] for name in self.columns}


def _walk(file: str, num_bytes: int) -> offset_index.Offsets:
    starts: list[int] = []
    try:
        with _opened(file, 0) as archive:
            for _, members in _samples(archive):
                starts.append(next(members)[0].offset)
            end = archive.offset
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
    counts = source.blocks(len(starts), _BLOCK_SAMPLES).tolist()
    return starts[::_BLOCK_SAMPLES], counts


# A file in an archive, with the key of its sample and its field.
_Member: TypeAlias = tuple[tarfile.TarInfo, str, str]


def _samples(archive: tarfile.TarFile) -> Iterator[tuple[str, Iterator[_Member]]]:
    # The samples by their keys.
    named = ((member, _named(member)) for member in _members(archive))
    members = ((member, *name) for member, name in named if name is not None)
    return itertools.groupby(members, key=lambda each: each[1])


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


def _named(member: tarfile.TarInfo) -> tuple[str, str] | None:
    # The key and the field of a file; None if it is of no sample.
    directory, slash, name = member.name.rpartition("/")
    key, dot, field = name.partition(".")
    if not member.isfile() or not dot or not key:
        return None
    return f"{directory}{slash}{key}", field.lower()


@contextlib.contextmanager
def _opened(file: str, offset: int) -> Iterator[tarfile.TarFile]:
    stream: BinaryIO
    with files.opened(file) as stream:
        stream.seek(offset)
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            yield archive
