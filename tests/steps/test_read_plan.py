import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, digest, errors
from elastic_ckpt.steps import read_plan
from elastic_ckpt.steps.table import StepTable
from tests.tiers import saved_worlds


def shards(whole, parts):
    """The boxes of a new grid."""
    return [
        (leaf.path, box)
        for leaf in whole.arrays
        for box in saved_worlds.grid(
            leaf.shape, [min(parts, dim) for dim in leaf.shape]
        )
    ]


def check(near, wanted, whole):
    """Every element of what is wanted is in one piece, with the digest of its item."""
    saved = {
        leaf.path: saved_worlds.values(leaf.path, leaf.shape) for leaf in whole.leaves
    }
    plan = read_plan.ReadPlan(near, read_plan.Wanted.from_boxes(wanted, contents=whole))
    made = [np.full(box.shape, np.nan, np.float32) for _, box in wanted]
    for number in range(len(plan.item)):
        read, item = plan.read(number), plan.item[number]
        box = plan.table.box(item)
        values = saved[plan.table.leaf(item).path]
        values = values[tuple(map(slice, box.start, box.stop))]
        assert digest.values_digest(values) == plan.table.digest(item)
        assert set(near.holders_of(item)) == set(plan.table.holders_of(item))
        into = made[plan.of_wanted[number]]
        assert np.isnan(into[read.into]).all()
        into[read.into] = values[read.out_of]
    for (path, box), read_values in zip(wanted, made, strict=True):
        at = tuple(map(slice, box.start, box.stop))
        assert np.array_equal(read_values, saved[path][at])


@given(saved_worlds.saved(), st.integers(0, 5), st.integers(1, 7))
def test_pieces_tile_every_wanted_box_exactly_once(saved, reader, parts):
    whole = saved[0].contents
    wanted = shards(whole, parts)
    near = read_plan.Nearness(StepTable(saved), saved_worlds.host(reader))
    check(near, wanted, whole)


@given(st.data())
def test_pieces_tile_also_where_saved_boxes_overlap(data):
    first = data.draw(saved_worlds.saved(most_hosts=3))
    whole = first[0].contents
    more = [
        (number, box)
        for number, leaf in enumerate(whole.arrays)
        for box in saved_worlds.grid(
            leaf.shape, [data.draw(st.integers(1, dim)) for dim in leaf.shape]
        )
    ]
    another = saved_worlds.saved_by(
        saved_worlds.host(9), whole, more, tier="persistent"
    )
    wanted = shards(whole, data.draw(st.integers(1, 5)))
    near = read_plan.Nearness(StepTable([*first, another]), saved_worlds.host(0))
    check(near, wanted, whole)


WHOLE = saved_worlds.contents({"w": [64]}, files=1)
FILE = saved_worlds.file_of(WHOLE, 0)
EVERY = [FILE, *((0, part) for part in saved_worlds.grid([64], [64]))]


def in_slice(name, number, **options):
    host = dataclasses.replace(saved_worlds.host(number), domains={"slice": name})
    return saved_worlds.saved_by(host, WHOLE, EVERY, **options)


SAVED = [
    in_slice("far", 0),
    in_slice("near", 1),
    in_slice("near", 2),
    in_slice("far", 3),
    in_slice("near", 4, tier="persistent"),
]


def wanted_whole():
    return read_plan.Wanted.from_boxes([("w", boxes.whole([64]))], contents=WHOLE)


def test_the_nearest_copy_is_read_and_the_others_are_next():
    reader = SAVED[2].host
    near = read_plan.Nearness(StepTable(SAVED), reader)
    plan = read_plan.ReadPlan(near, wanted_whole())
    orders = {tuple(near.holders_of(item)) for item in plan.item.tolist()}
    assert orders == {(2, 1, 0, 3, 4), (2, 1, 3, 0, 4)}
    named = [read_plan.NEARNESS[each] for each in near.of_holders]
    assert named == ["distant", "close", "local", "distant", "persistent"]
    of_file = near.holders_of(64)
    assert of_file[:2] + of_file[-1:] == [2, 1, 4]


def test_where_saved_boxes_overlap_the_nearest_and_then_the_largest_are_read():
    def cut(number, parts, **options):
        held = [(0, part) for part in saved_worlds.grid([64], [parts])]
        host = saved_worlds.host(number)
        return saved_worlds.saved_by(host, WHOLE, [FILE, *held], **options)

    own = saved_worlds.saved_by(
        saved_worlds.host(0), WHOLE, [(0, boxes.Box(start=(3,), stop=(9,)))]
    )
    table = StepTable([own, cut(1, 8), cut(2, 2), cut(3, 1, tier="persistent")])
    near = read_plan.Nearness(table, own.host)
    plan = read_plan.ReadPlan(near, wanted_whole())
    pieces = [
        (plan.read(n).piece, near.holders_of(item)[0])
        for n, item in enumerate(plan.item)
    ]
    assert sorted(
        (piece.start[0], piece.stop[0], holder) for piece, holder in pieces
    ) == [(0, 3, 2), (3, 9, 0), (9, 32, 2), (32, 64, 2)]


def test_a_step_with_a_gap_is_not_planned():
    lone = saved_worlds.saved_by(saved_worlds.host(0), WHOLE, EVERY[:-1])
    with pytest.raises(errors.CheckpointError, match=r"w\[63:64\].*complete step"):
        read_plan.ReadPlan(
            read_plan.Nearness(StepTable([lone]), lone.host), wanted_whole()
        )


def test_what_was_not_saved_cannot_be_wanted():
    with pytest.raises(errors.CheckpointError, match=r"no leaf 'v'; it has \['data/"):
        read_plan.Wanted.from_boxes([("v", boxes.whole([64]))], contents=WHOLE)
    for shape in ([65], [8, 8]):
        with pytest.raises(errors.CheckpointError, match=r"saved, w\[0:64\]; restore"):
            read_plan.Wanted.from_boxes([("w", boxes.whole(shape))], contents=WHOLE)
