"""Small training files of every format, and damage to them."""

import dataclasses
import pathlib

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python import array_record_module

from elastic_ckpt.data.sources import decoded, files, source
from tests import tfrecord_files

_COLUMNS = pa.schema([("text", pa.string()), ("tokens", pa.list_(pa.int64()))])


def write_texts(path: pathlib.Path, *, num_texts: int) -> str:
    texts = [b"text %d " % number * 5 for number in range(num_texts)]
    return write_records(path, texts, options="group_size:1")


def document(number: int) -> source.Element:
    """A text, and two to six tokens, that contain its number."""
    return {"text": f"text {number} ", "tokens": np.full(2 + number % 5, number)}


def documents(begin: int, end: int) -> list[source.Element]:
    return [document(number) for number in range(begin, end)]


def write_arrayrecord(path: pathlib.Path, elements: list[source.Element]) -> str:
    return write_records(path, [tfrecord_files.example(e) for e in elements])


def write_tfrecord(path: pathlib.Path, elements: list[source.Element]) -> str:
    tfrecord_files.write(path, (tfrecord_files.example(e) for e in elements))
    return str(path)


def write_parquet(
    path: pathlib.Path, elements: list[source.Element], *, group_rows: int = 8
) -> str:
    return write_table(
        path, pa.Table.from_pylist(elements, _COLUMNS), group_rows=group_rows
    )


def write_records(
    path: pathlib.Path,
    records: list[bytes],
    *,
    options: str = "group_size:1,uncompressed",
) -> str:
    """An ArrayRecord file; not compressed, its records can be found in its bytes."""
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def write_table(path: pathlib.Path, table: pa.Table, *, group_rows: int) -> str:
    """A Parquet file of small pages whose values can be found in its bytes."""
    pq.write_table(
        table,
        path,
        row_group_size=group_rows,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=64,
        write_batch_size=2,
    )
    return str(path)


def spoil(file: str, marker: bytes) -> None:
    """Flips a bit of `file`, at the first place where it has `marker`."""
    path = pathlib.Path(file)
    content = bytearray(path.read_bytes())
    content[content.index(marker)] ^= 1
    path.write_bytes(content)


def upload(file: str, directory: str) -> str:
    """Copies `file` to fsspec's store in memory, which outlives the test."""
    uri = f"memory://{directory}/{pathlib.Path(file).name}"
    with fsspec.open(uri, "wb") as remote:
        remote.write(pathlib.Path(file).read_bytes())
    return uri


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """A source in memory: the numbers from 0 on, in files with blocks of so many.

    The numbers in `corrupt` are damaged. If `chained` is set, the blocks of a file are
    a chain.
    """

    blocks: tuple[tuple[int, ...], ...]
    corrupt: frozenset[int] = frozenset()
    chained: bool = False

    @property
    def files(self):
        return tuple(f"/data/numbers-{n}" for n in range(len(self.blocks)))

    def settings(self):
        return {"format": "numbers", "columns": []}

    def _paths(self, file):
        return (file,)

    def index(self, file):
        counts = self.blocks[int(file.rpartition("-")[2])]
        return source.FileIndex(
            content=files.Content(
                num_bytes=8 * sum(counts), digest="0" * 16, version=""
            ),
            block_records=np.array(counts, np.int64),
            block_starts=np.full(len(counts), 8 * sum(counts)),
            chains=np.arange(len(counts)) * (not self.chained),
        )

    @property
    def key(self):
        return repr(self)

    def decode(self, file, block):
        if not self.chained:
            return self._block(file, block)
        chain = (self._block(file, n) for n in range(len(self.blocks[file])))
        return decoded.in_sequence(self, file, block, lambda: chain)

    def _block(self, file, block):
        first = sum(map(sum, self.blocks[:file])) + sum(self.blocks[file][:block])
        numbers = range(first, first + self.blocks[file][block])
        held = (bytes(str(number), "ascii") for number in numbers)
        return source.RawBlock(held, self._element, name="number", first=first)

    def _element(self, record, place):
        if int(record) in self.corrupt:
            raise source.corrupt(place, "spoilt")
        return {"number": int(record)}
