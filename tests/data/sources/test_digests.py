"""A file has another identity if what its format digests has changed."""

import io
import pathlib
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.data.sources import (
    arrayrecord,
    arrow,
    lines,
    megatron,
    parquet,
    source,
    tfrecord,
    webdataset,
)
from tests import corpora, megatron_files, tfrecord_files

NUMBER = 20_000
NOTE = "x" * 200_000
TABLE = pa.table({"text": ["a"]})


def text(begin="", end=""):
    """Lines, of which one is another one in the second content."""
    held = [f"{begin}document {number:05}{end}\n" for number in range(NUMBER)]
    before = "".join(held).encode()
    return before, before.replace(b"document 10000", b"document 99999")


def with_another_byte(content):
    """A content, and one with another byte near its middle."""
    middle = len(content) // 2 + 30
    assert len(content) > 100_000
    return content, content[:middle] + b"y" + content[middle + 1 :]


def tar(field="txt", content=b"x"):
    """An archive with a field and a content in its middle."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for number in range(200):
            is_middle = number == 100
            member = tarfile.TarInfo(f"{number}.{field if is_middle else 'txt'}")
            member.size = 1000
            held = 1000 * (content if is_middle else b"x")
            archive.addfile(member, io.BytesIO(held))
    return written.getvalue()


def noted(new):
    """A table with a long note in its metadata."""
    content = io.BytesIO()
    table = TABLE.replace_schema_metadata({"note": NOTE})
    with new(content, table.schema) as writer:
        writer.write_table(table)
    return content.getvalue()


def array_records(path):
    """Two files of one size, in which a record ends elsewhere."""
    for sizes in ([90, 110], [110, 90]):
        held = [b"x" * size for size in [100] * 2000 + sizes + [100] * 2000]
        yield pathlib.Path(corpora.write_records(path / "a", held)).read_bytes()


@pytest.mark.parametrize(
    ("make", "contents"),
    [
        (lines.Text, text()),
        (lambda files: lines.Text(files=files, whole_files=True), text()),
        (lines.JsonLines, text('{"text": "', '"}')),
        (tfrecord.TFRecord, with_another_byte(2000 * tfrecord_files.framed(b"x" * 80))),
        (webdataset.WebDataset, (tar(), tar(content=b"y"))),
        (webdataset.WebDataset, (tar(), tar(field="jpg"))),
        (arrow.Arrow, with_another_byte(noted(pa.ipc.new_stream))),
        (parquet.Parquet, with_another_byte(noted(pq.ParquetWriter))),
        (arrayrecord.ArrayRecord, array_records),
    ],
)
def test_a_change_between_the_spans_of_the_sample_changes_the_identity(
    tmp_path, make, contents
):
    path = tmp_path / "data"
    identities = []
    for content in contents(tmp_path) if callable(contents) else contents:
        path.write_bytes(content)
        identities.append(source.identity(make(files=(str(path),)))["files"][0])
    before, after = identities
    assert before[:4] == after[:4]
    assert before[4] != after[4]


def test_a_change_of_an_index_of_megatron_changes_the_identity(tmp_path):
    file = megatron_files.write(tmp_path, [[[1] * 4]] * NUMBER)
    dataset = megatron.Megatron(files=(file,))
    before = source.identity(dataset)
    indexes = source.indexes(dataset)
    assert source.identity(dataset) == before
    assert source.indexes(dataset) is indexes
    index = pathlib.Path(file).with_suffix(".idx")
    content = bytearray(index.read_bytes())
    assert set(np.frombuffer(content, "<i4", NUMBER, offset=34)) == {4}
    content[34 + 4 * NUMBER // 2] -= 1
    index.write_bytes(content)
    assert source.identity(dataset) != before
