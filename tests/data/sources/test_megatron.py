"""Megatron's indexed datasets."""

import contextlib
import pathlib

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files, megatron, source
from tests import megatron_files, source_contract


def documents(number, *, seed=0):
    random = np.random.default_rng(seed)
    return [
        [random.integers(0, 100, size) for size in random.integers(0, 9, sequences)]
        for sequences in random.integers(0, 4, number)
    ]


def flat(document):
    return [int(token) for sequence in document for token in sequence]


def read(dataset, num_shards=1, **reading):
    elements = source_contract.read_all(
        dataset, num_shards, **{"num_epochs": 1, **reading}
    )
    elements.sort(key=lambda element: element["record"])
    return [element["tokens"] for element in elements]


@pytest.mark.parametrize("dtype", megatron_files.CODES)
@pytest.mark.parametrize(("gap", "num_shards"), [(0, 5), (8, 1)])
def test_documents_are_read_as_they_were_written(
    tmp_path, monkeypatch, dtype, gap, num_shards
):
    monkeypatch.setattr(source, "BLOCK_RECORDS", 8)
    monkeypatch.setattr(source, "BLOCK_BYTES", 64)
    held = documents(43)
    dataset = megatron.Megatron(
        files=(megatron_files.write(tmp_path, held, dtype, gap=gap),)
    )
    tokens = read(dataset, num_shards, shuffle_seed=3)
    assert [each.tolist() for each in tokens] == [flat(each) for each in held]
    assert {each.dtype for each in tokens} == {np.dtype(dtype)}


@pytest.mark.parametrize("content", [b"", b"MMIDI", b"x" * 99])
def test_an_index_that_is_not_whole_is_named(tmp_path, content):
    file = megatron_files.write(tmp_path, documents(30))
    pathlib.Path(file).with_suffix(".idx").write_bytes(content)
    with pytest.raises(errors.DataError, match=r"data\.idx: not an index.*restore"):
        source.indexes(megatron.Megatron(files=(file,)))


@pytest.mark.parametrize("seed", range(8))
def test_a_spoilt_index_is_an_error_or_loses_no_document(tmp_path, seed):
    random = np.random.default_rng(seed)
    file = megatron_files.write(tmp_path, documents(30))
    path = pathlib.Path(file).with_suffix(".idx")
    content = bytearray(path.read_bytes())
    for place in random.integers(0, len(content), 3):
        content[place] ^= 1 << int(random.integers(8))
    path.write_bytes(bytes(content))
    with contextlib.suppress(errors.DataError):
        assert len(read(megatron.Megatron(files=(file,)))) == 30


def test_a_missing_index_is_named_and_other_files_are_refused(tmp_path):
    file = megatron_files.write(tmp_path, documents(3))
    pathlib.Path(file).with_suffix(".idx").unlink()
    files.forget_all()
    with pytest.raises(errors.DataError, match=r"data\.bin.*(correct|restore)"):
        source.indexes(megatron.Megatron(files=(file,)))
    with pytest.raises(errors.ConfigError, match=r"is no \.bin file"):
        megatron.Megatron(files=("data.idx",))
