"""Names that have the rank: as many of each rank as it has, in both directions."""

import numpy as np
import pytest

from elastic_ckpt.universal.rules.layout import LayoutError
from tests.universal.rules.relayout import (
    assert_same,
    layout,
    layout_of_one,
    numbered,
    relayout,
    rule,
    saved,
)

STAGES = rule({"stage{pp}.layers.{layer@pp}.up": "ff embed"}, {"up": "layer embed ff"})
SHARDS = rule({"embedding.rank_{tp:02}": "vocab@tp embed"}, {"embed": "vocab embed"})
UP = {"up": numbered(9, 2, 3)}
EMBED = {"embed": numbered(8, 3)}


def stages(*widths):
    """The tensors of stages that have so many layers."""
    layers = iter(UP["up"])
    return {
        f"stage{pp}.layers.{layer}.up": next(layers).T
        for pp, width in enumerate(widths)
        for layer in range(width)
    }


def shards(count):
    parts = np.split(EMBED["embed"], count)
    return {f"embedding.rank_{tp:02}": part for tp, part in enumerate(parts)}


@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize(
    ("keys", "widths"),
    [
        ({"ranks": {"pp": 3}}, (3, 3, 3)),
        ({"ranks": {"pp": 3}, "widths": {"layer": {"pp": [3, 4, 2]}}}, (3, 4, 2)),
        ({"widths": {"layer": {"pp": [3, 4, 2]}}}, (3, 4, 2)),
        ({"ranks": {"pp": 1}}, (9,)),
    ],
)
def test_each_rank_has_its_own_number_of_names(keys, widths, has_tree):
    made_by, tensors = layout(STAGES, **keys), stages(*widths)
    assert_same(relayout(made_by, tensors), UP)
    tree = tensors if has_tree else None
    assert_same(relayout(made_by.inverse(), UP, targets=tree), tensors)


@pytest.mark.parametrize("count", [1, 4])
def test_the_number_of_ranks_comes_from_the_layout_a_checkpoint_or_a_tree(count):
    tensors, ranks = shards(count), {"tp": count}
    assert_same(relayout(layout(SHARDS), tensors), EMBED)
    back = layout(SHARDS).inverse()
    assert_same(relayout(layout(SHARDS, ranks=ranks).inverse(), EMBED), tensors)
    assert_same(relayout(back, EMBED, ranks), tensors)
    assert_same(relayout(back, EMBED, targets=tensors), tensors)
    many = [
        saved("w", part, tp=tp) for tp, part in enumerate(np.split(EMBED["embed"], 4))
    ]
    to_names = layout_of_one({"w": "v@tp e"}, {"embedding.rank_{tp:02}": "v@tp e"})
    assert_same(relayout(to_names, many, {"tp": 4}), shards(4))


def test_a_checkpoint_may_leave_out_axes_of_one_rank():
    to_names = layout_of_one({"w": "v@tp e"}, {"embedding.rank_{tp:02}": "v@tp e"})
    assert_same(relayout(to_names, {"w": EMBED["embed"]}), shards(1))


def test_replicas_have_the_ranks_of_the_layout():
    replicas = rule({"{tp}.norm": {"dims": "d", "replicated": ["tp"]}}, {"norm": "d"})
    norm = numbered(3)
    made = relayout(layout(replicas, ranks={"tp": 2}).inverse(), {"norm": norm})
    assert_same(made, {"0.norm": norm, "1.norm": norm})
    with pytest.raises(LayoutError, match="sizes of tp"):
        relayout(layout(replicas).inverse(), {"norm": norm})


@pytest.mark.parametrize(
    ("made_by", "tensors", "message"),
    [
        (layout(STAGES).inverse(), UP, r"number of ranks of pp; .*`ranks: {pp: N}`"),
        (layout(SHARDS).inverse(), EMBED, r"`ranks: {tp: N}`"),
        (
            layout(SHARDS, ranks={"tp": 2}),
            shards(4),
            r"rules\[0\]: names have 4 ranks of tp, .* 2;",
        ),
        (
            layout(STAGES, widths={"layer": {"pp": [4, 5]}}),
            stages(3, 4, 2),
            "`widths` of layer has 2 entries for pp, and there are 3 ranks",
        ),
        (
            layout(STAGES, ranks={"pp": 2}).inverse(),
            UP,
            "9 elements are not 2 equal parts; give `widths`",
        ),
    ],
)
def test_a_number_of_ranks_that_is_missing_or_wrong_is_named(made_by, tensors, message):
    with pytest.raises(LayoutError, match=message):
        relayout(made_by, tensors)
