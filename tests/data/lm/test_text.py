import pytest

from elastic_ckpt.data import records
from elastic_ckpt.data.lm import text
from elastic_ckpt.data.sources import arrayrecord, parquet
from tests import runs


@pytest.mark.parametrize(
    ("file_type", "reader"),
    [("arrayrecord", arrayrecord.ArrayRecord), ("parquet", parquet.Parquet)],
)
def test_each_text_file_is_a_record_in_the_order_of_the_paths(
    tmp_path, monkeypatch, file_type, reader
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / "b" / "x.md").write_text("last")
    (tree / "empty").write_text("")
    (tree / "binary").write_bytes(b"\x00\x01")
    (tree / "latin").write_bytes(b"caf\xe9")
    (tree / ".hidden").write_text("not this")
    texts = [f"text {number} äöü" for number in range(250)]
    for number, content in enumerate(texts):
        (tree / f"a{number:03d}.txt").write_text(content)
    texts.append("last")
    written = text.write_arrayrecord(str(tree), str(tmp_path / "out" / "a"))
    assert written == text.Written(
        num_documents=251,
        text_bytes=sum(len(each.encode()) for each in texts),
        skipped=tuple(str(tree / name) for name in ("binary", "empty", "latin")),
    )
    file = str(tmp_path / "texts")
    assert "251 documents" in runs.verb("data", tree, file, "--type", file_type)
    reading = records.ReadOptions(num_epochs=1)
    read = records.Records(
        reader(files=(file,)), shard=0, num_shards=1, read_options=reading
    )
    found = [element["text"] for element in read]
    assert [t if isinstance(t, str) else t.decode() for t in found] == texts
