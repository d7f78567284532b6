import pathlib

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import arrayrecord
from tests import corpora


def refused(match):
    return pytest.raises(errors.DataError, match=match)


def test_records_are_numbered_over_all_files(tmp_path):
    files = [
        corpora.write_texts(tmp_path / name, num_texts=n)
        for name, n in [("a", 3), ("b", 0), ("c", 2)]
    ]
    source = arrayrecord.ArrayRecordFiles(files)
    assert source.records_per_file == (3, 0, 2)
    assert [source[n] for n in range(len(source))] == [
        (0, b"text 0 " * 5),
        (1, b"text 1 " * 5),
        (2, b"text 2 " * 5),
        (3, b"text 0 " * 5),
        (4, b"text 1 " * 5),
    ]


def test_the_identity_names_files_sizes_and_counts_but_no_directory(tmp_path):
    file = corpora.write_texts(tmp_path / "a", num_texts=3)
    size = pathlib.Path(file).stat().st_size
    assert arrayrecord.ArrayRecordFiles([file]).identity() == [["a", size, 3]]


def test_patterns_give_sorted_files_in_the_order_of_the_patterns(tmp_path):
    for name in ("b2", "b1", "a1"):
        corpora.write_texts(tmp_path / name, num_texts=1)
    found = arrayrecord.find_files(f"{tmp_path}/b*, {tmp_path}/a1")
    assert [pathlib.Path(f).name for f in found] == ["b1", "b2", "a1"]


def test_missing_files_are_named_with_the_pattern(tmp_path):
    with refused(r"nothing\* matches no file; write one with"):
        arrayrecord.find_files(f"{tmp_path}/nothing*")
    with refused("grain_train_files is empty; set it"):
        arrayrecord.find_files(" , ")


def test_files_without_a_record_are_an_error(tmp_path):
    file = corpora.write_texts(tmp_path / "a", num_texts=0)
    with refused("a: not one record; write them again"):
        arrayrecord.ArrayRecordFiles([file])


@pytest.mark.parametrize("keep", [0, 40_000, 70_000])
def test_a_file_cut_short_is_named(tmp_path, keep):
    path = pathlib.Path(corpora.write_texts(tmp_path / "a", num_texts=10))
    path.write_bytes(path.read_bytes()[:keep])
    with refused(r"/a: not a readable ArrayRecord file .*; restore it"):
        arrayrecord.ArrayRecordFiles([str(path)])


def test_a_corrupt_record_is_named_with_its_file_and_place(tmp_path):
    good = corpora.write_texts(tmp_path / "good", num_texts=4)
    path = pathlib.Path(corpora.write_texts(tmp_path / "bad", num_texts=4))
    content = bytearray(path.read_bytes())
    # The chunk of the first record begins at 64, behind the file's own header.
    content[100] ^= 0xFF
    path.write_bytes(content)
    source = arrayrecord.ArrayRecordFiles([good, str(path)])
    with refused(r"/bad, record 0: cannot be read .*; restore the file"):
        source[4]
