"""Megatron's indexed datasets."""

import pathlib

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files, megatron, source
from tests import megatron_files
from tests.source_contract import in_order


@pytest.mark.parametrize("dtype", megatron_files.CODES)
@pytest.mark.parametrize(("gap", "num_shards"), [(0, 5), (8, 1)])
def test_documents_are_read_as_they_were_written(
    tmp_path, monkeypatch, dtype, gap, num_shards
):
    monkeypatch.setattr(source, "BLOCK_RECORDS", 8)
    monkeypatch.setattr(source, "BLOCK_BYTES", 64)
    random = np.random.default_rng(0)
    held = [
        [random.integers(0, 100, n, dtype) for n in random.integers(0, 9, sequences)]
        for sequences in random.integers(0, 4, 43)
    ]
    file = megatron_files.write(tmp_path, held, dtype, gap=gap)
    dataset = megatron.Megatron(files=(file,))
    elements = in_order(dataset, num_shards, shuffle_seed=3)
    for element, document in zip(elements, held, strict=True):
        expected = np.concatenate([np.zeros(0, dtype), *document])
        np.testing.assert_array_equal(element["tokens"], expected, strict=True)


ONE = np.int64(1).tobytes()
MINUS = b"\xff" * 4
OTHER = r"data\.bin: its index .*another file"
NOT_WHOLE = r"data\.idx: not an index.*restore"


@pytest.mark.parametrize(
    ("suffix", "change", "match"),
    [
        (".idx", lambda content: content[:0], NOT_WHOLE),
        (".idx", lambda content: b"x" + content[1:], NOT_WHOLE),
        (".bin", lambda content: content + b"\0", OTHER),
        # The last document ends after the first of two sequences.
        (".idx", lambda content: content[:-8] + ONE, OTHER),
        # The first one begins at the second, or the third one before the second.
        (".idx", lambda content: content[:-32] + ONE + content[-24:], OTHER),
        (".idx", lambda content: content[:-16] + ONE + content[-8:], OTHER),
        # The first sequence has -1 tokens, begins before the file, or ends after it.
        (".idx", lambda content: content[:34] + MINUS + content[38:], OTHER),
        (".idx", lambda content: content[:42] + MINUS * 2 + content[50:], OTHER),
        (".idx", lambda content: content[:34] + b"\x08" + content[35:], OTHER),
        (".idx", None, r"data\.bin.*(correct|restore)"),
    ],
)
def test_an_index_that_is_not_that_of_all_tokens_is_refused(
    tmp_path, suffix, change, match
):
    file = megatron_files.write(tmp_path, [[range(3), range(4)], [], []])
    path = pathlib.Path(file).with_suffix(suffix)
    content = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(content))
    files.forget_all()
    with pytest.raises(errors.DataError, match=match):
        source.indexes(megatron.Megatron(files=(file,)))
