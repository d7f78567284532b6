import grain
import pytest

from elastic_ckpt.data import records
from elastic_ckpt.data.lm import text
from elastic_ckpt.data.sources import arrayrecord, parquet
from tests import runs


def read(file):
    source = grain.sources.ArrayRecordDataSource([str(file)])
    return [source[n] for n in range(len(source))]


def test_each_text_file_is_a_record_in_the_order_of_the_paths(tmp_path):
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / "b" / "x.md").write_text("second")
    (tree / "a.txt").write_text("erstes Stück")
    (tree / "empty").write_text("")
    (tree / "binary").write_bytes(b"\x00\x01")
    (tree / "latin").write_bytes(b"caf\xe9")
    (tree / ".hidden").write_text("not this")
    out = tmp_path / "out" / "texts.array_record"
    written = text.write_arrayrecord(str(tree), str(out))
    assert read(out) == ["erstes Stück".encode(), b"second"]
    skipped = tuple(str(tree / name) for name in ("binary", "empty", "latin"))
    assert written == text.Written(num_documents=2, text_bytes=13 + 6, skipped=skipped)


@pytest.mark.parametrize(
    ("file_type", "reader"),
    [
        ("arrayrecord", arrayrecord.ArrayRecord),
        ("parquet", parquet.Parquet),
    ],
)
def test_every_type_that_is_written_is_read_as_the_same_texts(
    tmp_path, monkeypatch, file_type, reader
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tree").mkdir()
    texts = [f"text {number} äöü" for number in range(250)]
    for number, content in enumerate(texts):
        (tmp_path / "tree" / f"{number:03d}.txt").write_text(content)
    file = str(tmp_path / "texts")
    output = runs.verb("data", tmp_path / "tree", file, "--type", file_type)
    assert "250 documents" in output
    reading = records.ReadOptions(num_epochs=1)
    actual = records.Records(
        reader(files=(file,)), shard=0, num_shards=1, read_options=reading
    )
    decoded = [
        text if isinstance(text, str) else text.decode()
        for text in (element["text"] for element in actual)
    ]
    assert decoded == texts
