"""Hugging Face's datasets on disk, and files of Polars."""

import types

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import arrow
from tests import corpora
from tests.data.sources import test_contract
from tests.source_contract import texts

ELEMENTS = corpora.documents(0, 20)
TEXTS = [each["text"] for each in ELEMENTS]


class Dataset(types.SimpleNamespace):
    """A stand-in of `datasets.Dataset` with what `from_hf` looks at."""

    def __len__(self):
        return self.length


def test_a_dataset_of_hugging_face_is_read_if_it_is_what_its_files_are(tmp_path):
    test_contract.TestArrow().write(tmp_path / "a", ELEMENTS)
    cache_files = [{"filename": str(tmp_path / "a")}]
    whole = {"cache_files": cache_files, "_indices": None, "length": 20}
    assert texts(arrow.from_hf(Dataset(**whole), columns=("text",))) == TEXTS
    for dataset, match in (
        (Dataset(**whole | {"_indices": np.arange(20)}), "and in their order; save"),
        (Dataset(**whole | {"length": 10}), "all of them and in their order; save"),
        (Dataset(**whole | {"cache_files": []}), "this Dataset is no .* on disk"),
        ({"train": Dataset(**whole)}, "this dict is no .*; save one split"),
        ([1, 2], "this list is no"),
    ):
        with pytest.raises(errors.ConfigError, match=match):
            arrow.from_hf(dataset)


def test_a_file_without_the_length_of_its_schema_is_read_as_polars_writes_it(tmp_path):
    path = tmp_path / "a"
    test_contract.TestArrowFile().write(path, ELEMENTS)
    content = path.read_bytes()
    # A message begins with a mark and its length.
    path.write_bytes(content[:8] + content[16:])
    assert texts(arrow.Arrow(files=(str(path),))) == TEXTS
