"""Empty tensors, whose dims may have any size, make no names without end."""

import numpy as np
import pytest

from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.matching import moves
from elastic_ckpt.universal.rules.rule import Rule, side
from elastic_ckpt.universal.stored import StoredTensor

RULE = Rule(
    source=side({"w{n:path}": "layer x"}), target=side({"{n:path}/{layer}": "x"})
)


def empty(*sizes):
    return [
        StoredTensor(name=f"w{n}", dtype=np.dtype(np.float32), shape=(size, 0))
        for n, size in enumerate(sizes)
    ]


def test_a_large_dim_makes_no_target_for_each_index():
    with pytest.raises(LayoutError, match=f"{2**48} tensors would be made of"):
        moves(Layout(rules=(RULE,)), empty(2, 2**48), {}, None)


def test_many_dims_make_no_more_targets_together(monkeypatch):
    monkeypatch.setattr(matching, "MOST_DERIVED", 5)
    made = moves(Layout(rules=(RULE,)), empty(2, 3), {}, None)
    assert sorted(made.targets) == ["0/0", "0/1", "1/0", "1/1", "1/2"]
    with pytest.raises(LayoutError, match="over 5 tensors would be made"):
        moves(Layout(rules=(RULE,)), empty(2, 3, 1), {}, None)
