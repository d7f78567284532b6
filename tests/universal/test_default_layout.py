"""Without rules, whole tensors keep their names, and shards are refused."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from elastic_ckpt.universal import default_layout, equal_leaves, shipped_layouts
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, StoredTensor
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.rules import relayout

KINDS = ("parameter", "master", "first_moment", "buffer")
DTYPE = np.dtype(np.float32)
# Characters of patterns, and digits, which names have in common.
NAMES = st.lists(st.text("a{}*[]:0/", min_size=1, max_size=6), min_size=1, unique=True)


def checkpoint_of(saved):
    return Checkpoint(format="some format", tensors=relayout.stored(saved))


def made(saved):
    layout = default_layout.layout(checkpoint_of(saved))
    return relayout.relayout(layout, saved, {})


def test_tensors_of_one_kind_keep_their_names():
    expected = {
        "a/b.0.w": relayout.numbered(2, 3),
        "a/b.1.w": relayout.numbered(4, 1),
        # Numbers that are alike, with other dims and spellings.
        "a/c.1.w": relayout.numbered(3),
        "a/c.2.w": relayout.numbered(3, 2),
        "a/c.02.w": relayout.numbered(5),
        "scale": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    saved = [relayout.saved(name, array) for name, array in expected.items()]
    relayout.assert_same(made(saved), expected)


def test_kinds_come_before_names():
    array = relayout.numbered(2, 3)
    saved = [
        relayout.saved("w.0", (1 + n) * array, kind) for n, kind in enumerate(KINDS)
    ]
    saved.append(relayout.saved("w.0", np.array(7, np.float32), "step"))
    expected = {f"{kind}/w.0": (1 + n) * array for n, kind in enumerate(KINDS)}
    expected["step/w.0"] = np.array(7, np.float32)
    relayout.assert_same(made(saved), expected)


def test_shards_of_ranks_are_refused(monkeypatch):
    # To try those that ship takes seconds.
    monkeypatch.setattr(shipped_layouts, "shipped", list)
    saved = [relayout.saved("w", relayout.numbered(2), tp=rank) for rank in (0, 1)]
    with pytest.raises(LayoutError, match="some format has shards of ranks"):
        made(saved)
    with pytest.raises(LayoutError, match="no tensors"):
        default_layout.layout(checkpoint_of([]))


def equal_leaves_of(names, targets):
    wanted = {
        name: TargetTensor(name=name, dtype=DTYPE, shape=(2,)) for name in targets
    }
    layout = equal_leaves.layout_of("path", stored(names), wanted)
    return matching.moves(layout, stored(names), {}, wanted)


def stored(names):
    return [StoredTensor(name=name, dtype=DTYPE, shape=(2,)) for name in names]


def test_tensors_that_the_target_lacks_are_dropped():
    (move,) = equal_leaves_of(["a", "b"], ["b"]).moves
    assert (move.source, move.target) == (1, "b")


@hypothesis.given(NAMES, st.data())
def test_names_with_characters_of_patterns_are_taken_as_they_are(names, data):
    targets = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    moves = equal_leaves_of(names, targets).moves
    assert {names[each.source]: each.target for each in moves} == {
        name: name for name in targets
    }
    tensors = [
        dataclasses.replace(each, kind=kind)
        for each in stored(names)
        for kind in ("parameter", "first_moment")
    ]
    checkpoint = Checkpoint(format="test", tensors=tensors)
    made = matching.moves(default_layout.layout(checkpoint), tensors, {}, None)
    kinds = ("first_moment", "parameter")
    assert sorted(made.targets) == sorted(f"{k}/{n}" for k in kinds for n in names)
