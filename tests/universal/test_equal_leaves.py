"""Tensors of equal names fill a target without a layout file."""

import dataclasses

import hypothesis
import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.universal import default_layout, equal_leaves
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.stored import StoredTensor

DTYPE = np.dtype(np.float32)
# Characters of patterns, and digits, which names have in common.
NAMES = st.lists(st.text("a{}*[]:0/", min_size=1, max_size=6), min_size=1, unique=True)


def stored(names):
    return [StoredTensor(name=name, dtype=DTYPE, shape=(2,)) for name in names]


def layout(names, targets):
    wanted = {
        name: TargetTensor(name=name, dtype=DTYPE, shape=(2,)) for name in targets
    }
    made = equal_leaves.layout_of("path", stored(names), wanted)
    return matching.moves(made, stored(names), {}, wanted)


def test_tensors_that_the_target_lacks_are_dropped():
    (move,) = layout(["a", "b"], ["b"]).moves
    assert (move.source, move.target) == (1, "b")


@hypothesis.given(NAMES, st.data())
def test_names_with_characters_of_patterns_are_taken_as_they_are(names, data):
    targets = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    moves = layout(names, targets).moves
    assert {names[each.source]: each.target for each in moves} == {
        name: name for name in targets
    }


@hypothesis.given(NAMES)
def test_a_conversion_keeps_names_with_characters_of_patterns(names):
    checkpoint = OpenedCheckpoint(format="test", tensors=stored(names))
    tensors = [
        dataclasses.replace(each, kind=kind)
        for each in checkpoint.tensors
        for kind in ("parameter", "first_moment")
    ]
    made = matching.moves(default_layout.layout(checkpoint), stored(names), {}, None)
    assert sorted(made.targets) == sorted(names)
    checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    made = matching.moves(default_layout.layout(checkpoint), tensors, {}, None)
    kinds = ("first_moment", "parameter")
    assert sorted(made.targets) == sorted(f"{k}/{n}" for k in kinds for n in names)
