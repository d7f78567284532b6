"""JSON Lines and plain text, as they are and compressed."""

import gzip
import json
import pathlib

import pyarrow as pa
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import records
from elastic_ckpt.data.sources import decoded, lines, source
from tests import corpora, source_contract

ROOT = pathlib.Path(__file__).parents[3]
LINES = [f"line {number} é" for number in range(20)]


def encoded(elements):
    plain = [{**each, "tokens": each["tokens"].tolist()} for each in elements]
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in plain)


class TestJsonLines(source_contract.SourceContract):
    def write(self, path, elements):
        path.write_text(encoded(elements))
        return str(path)

    def make(self, files, columns=()):
        return lines.JsonLines(files=files, columns=columns)

    def as_read(self, element):
        return element

    def spoil(self, file, marker):
        corpora.spoil_encoding(file, marker)

    # A file without its last end of line is whole, and one of that byte is empty.
    @pytest.mark.parametrize("kept", [1, 10, 0.49, 0.99, -2])
    def test_a_file_cut_short_is_named(self, files, kept):
        super().test_a_file_cut_short_is_named(files, kept)


def compressed(path, content):
    """Writes bytes, compressed as the suffix of the name says."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(content)
    else:
        path.write_bytes(content)
    return str(path)


def texts(dataset, num_shards=1):
    read = source_contract.read_all(dataset, num_shards, num_epochs=1)
    return [each["text"] for each in read]


@pytest.mark.parametrize(
    ("suffix", "end"), [("", "\r\n"), (".gz", "\n"), (".zst", "\n\n  \n")]
)
def test_each_line_that_is_not_blank_is_a_document(tmp_path, suffix, end):
    content = end.join(LINES).encode()
    file = compressed(tmp_path / f"a.txt{suffix}", content)
    assert texts(lines.Text(files=(file,))) == LINES
    of_column = lines.Text(files=(file,), columns=("content",))
    (element, *_) = source_contract.read_all(of_column, 1, num_epochs=1)
    assert element == {"content": LINES[0], "record": 0}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_may_be_a_document(tmp_path, suffix):
    files = [
        compressed(tmp_path / f"{number}.txt{suffix}", f"{line}\nand\n".encode())
        for number, line in enumerate(LINES)
    ]
    files.append(compressed(tmp_path / "empty.txt", b""))
    dataset = lines.Text(files=tuple(files), whole_files=True)
    assert texts(dataset) == [f"{line}\nand\n" for line in LINES]
    assert sorted(texts(dataset, 3)) == sorted(texts(dataset))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_compressed_file_is_a_chain_that_a_resume_reads_up_to_the_record(
    tmp_path, suffix, num_shards, monkeypatch
):
    monkeypatch.setattr(source, "BLOCK_RECORDS", 4)
    monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
    elements = corpora.documents(0, 20)
    file = compressed(tmp_path / f"a.jsonl{suffix}", encoded(elements).encode())
    dataset = lines.JsonLines(files=(file,), columns=("text",))
    assert source.indexes(dataset)[0].chain(3) == range(5)
    source_contract.assert_resumes_everywhere(
        lambda: records.Records(
            dataset,
            shard=0,
            num_shards=num_shards,
            read_options=records.ReadOptions(num_epochs=2, shuffle_seed=3),
        )
    )
    read = source_contract.read_all(dataset, num_shards, num_epochs=1, shuffle_seed=3)
    assert sorted(each["record"] for each in read) == list(range(20))


@pytest.mark.parametrize(("suffix", "kept"), [(".gz", 0.9), (".zst", 0.3)])
def test_a_compressed_file_that_is_cut_short_is_named(tmp_path, suffix, kept):
    content = encoded(corpora.documents(0, 2000)).encode()
    path = pathlib.Path(compressed(tmp_path / f"a.jsonl{suffix}", content))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(errors.DataError, match=r"a\.jsonl.*restore"):
        source.indexes(lines.JsonLines(files=(str(path),)))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damage_in_a_compressed_file_loses_its_rest(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(lines, "_BUFFER_BYTES", 4096)
    content = encoded(corpora.documents(0, 20_000)).encode()
    path = pathlib.Path(compressed(tmp_path / f"a.jsonl{suffix}", content))
    dataset = lines.JsonLines(files=(str(path),), columns=("text",))
    source.indexes(dataset)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    reading = {"num_epochs": 1, "skip_corrupt": True}
    iterator = iter(source_contract.read(dataset, 0, 1, **reading))
    num_read = sum(1 for _ in iterator)
    assert 0 < num_read < 20_000
    assert iterator.get_state()["skipped"] == 20_000 - num_read
    # What is lost does not depend on where reading began.
    for begin in (1, num_read // 2, num_read - 7, num_read):
        resumed = iter(source_contract.read(dataset, 0, 1, **reading))
        resumed.set_state({"epoch": 0, "taken": begin})
        assert sum(1 for _ in resumed) == num_read - begin


@pytest.mark.parametrize("line", ["[1, 2]", "{", "[" * 100_000])
def test_a_line_that_is_no_object_is_corrupt(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + '\n{"text": "b"}\n')
    dataset = lines.JsonLines(files=(str(path),))
    with pytest.raises(errors.DataError, match="record 1: corrupt"):
        texts(dataset)
    skipping = source_contract.read_all(dataset, 1, num_epochs=1, skip_corrupt=True)
    assert [each["text"] for each in skipping] == ["a", "b"]
