import pytest

from elastic_ckpt.data.lm import text
from elastic_ckpt.data.sources import arrayrecord, parquet
from tests import runs, source_contract

TEXTS = [*(f"text {number} äöü".encode() for number in range(250)), b"last"]
NO_TEXTS = {"binary": b"\0\1", "b/.no": b"no", "empty": b"", "latin": b"caf\xe9"}


@pytest.mark.parametrize(
    ("file_type", "reader"),
    [("arrayrecord", arrayrecord.ArrayRecord), ("parquet", parquet.Parquet)],
)
def test_each_text_file_is_a_record_in_the_order_of_the_paths(
    tmp_path, monkeypatch, file_type, reader
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree, file = tmp_path / "tree", str(tmp_path / "texts")
    (tree / "b").mkdir(parents=True)
    names = [*(f"a{number:03d}.txt" for number in range(250)), "b/x.md", *NO_TEXTS]
    for name, content in zip(names, [*TEXTS, *NO_TEXTS.values()], strict=True):
        (tree / name).write_bytes(content)
    written = text.write_arrayrecord(str(tree), str(tmp_path / "out" / "a"))
    assert written == text.Written(
        num_documents=251,
        text_bytes=sum(map(len, TEXTS)),
        skipped=tuple(str(tree / name) for name in ("binary", "empty", "latin")),
    )
    assert "251 documents" in runs.verb("data", tree, file, "--type", file_type)
    found = source_contract.texts(reader(files=(file,)))
    assert [t if isinstance(t, bytes) else t.encode() for t in found] == TEXTS
