"""PyTorch's distributed checkpoints: what PyTorch saves in other ways, and by hand.

`test_samples` has those that are read.
"""

import itertools

import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import dcp_files, stored_values
from tests.universal.formats.stored_values import DATA


@pytest.mark.parametrize(
    ("save", "match"),
    [
        ("zstd", r"\.metadata lists items that extensions changed.*'stream\.zstd/1'"),
        ("safetensors", r"__0_0\.distcp is no file of torch\.save"),
    ],
)
def test_extensions_and_other_formats_of_tensors_are_refused(save, match):
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(DATA / "dcp_saves" / save)


def test_a_tensor_of_thousands_of_chunks_is_read(tmp_path):
    kinds = [dcp_files.item(np.float32([n])) for n in range(7)]
    parts, count = dcp_files.parts(), 2100
    chunks = [((n,), (1,)) for n in range(count)]
    parts.entries = {"w": dcp_files.entry((count,), chunks)}
    parts.items = [kinds[n % 7] for n in range(count)]
    ends = itertools.accumulate(map(len, parts.items), initial=0)
    parts.stored = [
        (("w", (n,)), (dcp_files.FILE, at, len(parts.items[n])))
        for n, at in enumerate(itertools.islice(ends, count))
    ]
    checkpoint = opening.open_checkpoint(parts.write(tmp_path / "x"))
    (tensor,) = checkpoint.tensors
    assert stored_values.read(tensor).tolist() == [n % 7 for n in range(count)]
    assert checkpoint.check([tensor.fragments[0].file]) == []


@pytest.mark.parametrize("keys", [(), 5, "w"])
def test_paths_of_names_that_are_none_are_passed_over(tmp_path, keys):
    parts, name = dcp_files.parts(), "o.state.w.exp_avg"
    parts.entries[name] = parts.entries["w"]
    parts.stored += [((name, first), place) for (_, first), place in parts.stored]
    parts.paths = {"w": keys, "absent": ("w",)}
    tensors = opening.open_checkpoint(parts.write(tmp_path / "x")).tensors
    kinds = [(t.name, t.kind) for t in tensors]
    assert kinds == [("w", "parameter"), ("w", "first_moment")]
