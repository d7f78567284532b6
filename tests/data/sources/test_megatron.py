"""Megatron's indexed datasets."""

import pathlib

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files, megatron, source
from tests import megatron_files
from tests.source_contract import in_order


@pytest.mark.parametrize("dtype", megatron_files.CODES)
def test_tokens_have_the_type_that_they_were_written_in(tmp_path, dtype):
    held = [[[0, 100], [], [7]], [], [[]], [[5]]]
    dataset = megatron.Megatron(files=(megatron_files.write(tmp_path, held, dtype),))
    tokens = [element["tokens"] for element in in_order(dataset)]
    assert [each.tolist() for each in tokens] == [[0, 100, 7], [], [], [5]]
    assert {each.dtype for each in tokens} == {np.dtype(dtype)}


ONE = np.int64(1).tobytes()
MINUS = b"\xff" * 4
OTHER = r"data\.bin does not match its index"
NOT_WHOLE = r"data\.idx is not a Megatron index.*restore"


@pytest.mark.parametrize(
    ("suffix", "change", "match"),
    [
        (".idx", lambda content: content[:0], NOT_WHOLE),
        (".idx", lambda content: b"x" + content[1:], NOT_WHOLE),
        (".idx", lambda content: content[:-8], NOT_WHOLE),
        (".idx", lambda content: content + b"\0", NOT_WHOLE),
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
