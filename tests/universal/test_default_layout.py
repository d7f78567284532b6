"""Conversions without rules keep the names of whole tensors, and refuse shards."""

import numpy as np
import pytest

from elastic_ckpt.universal import default_layout
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.layouts import hf_models, test_megatron_to_hf
from tests.universal.rules import relayout

KINDS = ("parameter", "master", "first_moment", "buffer")


def checkpoint_of(saved):
    return OpenedCheckpoint(format="some format", tensors=relayout.stored(saved))


def made(saved, **options):
    layout = default_layout.layout(checkpoint_of(saved), **options)
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
    for left_out in ("parameter/w.0", "buffer/w.0"):
        del expected[left_out]
    # They have no other masters.
    saved.append(relayout.saved("frozen.0", array))
    saved.append(relayout.saved("table.0", array, "buffer"))
    expected |= {"master/frozen.0": array, "master/table.0": array}
    relayout.assert_same(made(saved, of_optimizer=True), expected)


def test_weights_are_masters_if_there_are_no_others():
    array = relayout.numbered(2, 3).astype(np.float16)
    arrays = made([relayout.saved("w", array)], of_optimizer=True)
    relayout.assert_same(arrays, {"master/w": array.astype(np.float32)})


@pytest.mark.slow
def test_shards_of_ranks_are_refused_with_the_layouts_that_fit():
    saved = [relayout.saved("w", relayout.numbered(2), tp=rank) for rank in (0, 1)]
    with pytest.raises(LayoutError, match="some format has shards of ranks"):
        made(saved)
    arrays = hf_models.model(hf_models.ATTENTION, hf_models.DENSE)
    tensors, _ = test_megatron_to_hf.ranks_of(arrays, "plain", tp=2, pp=1)
    with pytest.raises(LayoutError, match="megatron_ranks_to_hf ships and fits"):
        made(tensors)
    with pytest.raises(LayoutError, match="no tensors"):
        default_layout.layout(checkpoint_of([]))
