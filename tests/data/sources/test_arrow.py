"""Arrow files that are damaged, and Hugging Face's datasets on disk."""

import pathlib
import types

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import arrow, source
from tests import corpora
from tests.data.sources import test_contract
from tests.source_contract import read_all


def written(path):
    return test_contract.TestArrow().write(path, corpora.documents(0, 20))


@pytest.mark.parametrize(
    "content", [b"\xff" * 200, b"\xff\xff\xff\xff" + b"\x10\0\0\0" * 40]
)
def test_a_damaged_message_is_named(tmp_path, content):
    file = written(tmp_path / "a.arrow")
    path = pathlib.Path(file)
    spoilt = bytearray(path.read_bytes())
    second = source.indexes(arrow.Arrow(files=(file,)))[0].block_bytes[1]
    spoilt[second : second + len(content)] = content
    path.write_bytes(bytes(spoilt))
    with pytest.raises(errors.DataError, match=r"a\.arrow: not a complete Arrow file"):
        source.current_indexes(arrow.Arrow(files=(file,)))


def saved(tmp_path, num_documents=20):
    """A stand-in of `datasets.Dataset` with what `from_hf` looks at."""
    file = written(tmp_path / "data-00000-of-00001.arrow")

    class Dataset(types.SimpleNamespace):
        def __len__(self):
            return num_documents

    return Dataset(cache_files=[{"filename": file}], _indices=None)


def test_a_dataset_of_hugging_face_is_read_from_its_files(tmp_path):
    made = arrow.from_hf(saved(tmp_path), columns=("text",))
    assert len(read_all(made, 2, num_epochs=1)) == 20


def test_a_dataset_that_is_not_what_its_files_are_is_refused(tmp_path):
    reordered = saved(tmp_path)
    reordered._indices = np.arange(20)
    in_memory = saved(tmp_path)
    in_memory.cache_files = []
    for dataset, match in (
        (reordered, "all of them and in their order; save"),
        (saved(tmp_path, 10), "all of them and in their order; save"),
        (in_memory, "this Dataset is no .* on disk"),
        ({"train": saved(tmp_path)}, "this dict is no .*; save one split"),
        ([1, 2], "this list is no"),
    ):
        with pytest.raises(errors.ConfigError, match=match):
            arrow.from_hf(dataset)


def test_a_file_without_the_length_of_its_schema_is_read_as_polars_writes_it(tmp_path):
    elements = corpora.documents(0, 20)
    path = pathlib.Path(test_contract.TestArrowFile().write(tmp_path / "a", elements))
    content = path.read_bytes()
    # A message begins with a mark and its length.
    path.write_bytes(content[:8] + content[16:])
    found = read_all(arrow.Arrow(files=(str(path),)), 1, num_epochs=1)
    assert [each["text"] for each in found] == [each["text"] for each in elements]
