"""Tensors of equal names fill a target without a layout file."""

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.universal import equal_leaves
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.stored import StoredTensor

DTYPE = np.dtype(np.float32)


def layout(stored, targets):
    return equal_leaves.layout_of(
        "path",
        [StoredTensor(name=name, dtype=DTYPE, shape=(2,)) for name in stored],
        {name: TargetTensor(name=name, dtype=DTYPE, shape=(2,)) for name in targets},
    )


def test_tensors_that_the_target_lacks_are_dropped():
    assert layout(["a", "b"], ["a"]).drop == ("b",)


@pytest.mark.parametrize(
    ("stored", "targets"),
    [(["a{b}"], ["a{b}"]), (["a", "b{"], ["a"]), (["ab", "a*"], ["ab"])],
)
def test_names_that_are_patterns_are_refused(stored, targets):
    with pytest.raises(errors.CheckpointError, match="layouts have no names with"):
        layout(stored, targets)
