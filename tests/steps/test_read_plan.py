import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, digest, errors
from elastic_ckpt.steps import read_plan
from elastic_ckpt.steps.table import StepTable
from tests.tiers import saved_worlds


def parts_of(data, whole):
    """The number of each array and the boxes of a grid, which is drawn."""
    for number, leaf in enumerate(whole.arrays):
        parts = [data.draw(st.integers(1, dim)) for dim in leaf.shape]
        for box in saved_worlds.grid(leaf.shape, parts):
            yield number, box


@pytest.mark.parametrize("overlaps", [False, True])
@given(data=st.data(), reader=st.integers(0, 5))
def test_pieces_tile_every_wanted_box_exactly_once(overlaps, data, reader):
    saved = data.draw(saved_worlds.saved(most_hosts=3 if overlaps else 8))
    whole = saved[0].contents
    if overlaps:
        host, more = saved_worlds.host(9), parts_of(data, whole)
        saved.append(saved_worlds.saved_by(host, whole, more, tier="persistent"))
    near = read_plan.Nearness(StepTable(saved), saved_worlds.host(reader))
    wanted = [(whole.leaves[n].path, box) for n, box in parts_of(data, whole)]
    plan = read_plan.ReadPlan(near, read_plan.Wanted.from_boxes(wanted, contents=whole))
    made = [np.full(box.shape, np.nan, np.float32) for _, box in wanted]
    for number, item in enumerate(plan.item):
        read, box = plan.read(number), plan.table.box(item)
        leaf = plan.table.leaf(item)
        values = saved_worlds.values(leaf.path, leaf.shape)
        values = values[(*map(slice, box.start, box.stop), ...)]
        assert digest.values_digest(values) == plan.table.digest(item)
        assert set(near.holders_of(item)) == set(plan.table.holders_of(item))
        into = made[plan.of_wanted[number]]
        assert np.isnan(into[read.into]).all()
        into[read.into] = values[read.out_of]
    for (path, box), values in zip(wanted, made, strict=True):
        expected = saved_worlds.values(path, whole.leaves["bw".index(path)].shape)
        assert np.array_equal(values, expected[(*map(slice, box.start, box.stop), ...)])


WHOLE = saved_worlds.contents({"w": [64]}, files=1)
FILE = saved_worlds.file_of(WHOLE, 0)
EVERY = [FILE, *((0, part) for part in saved_worlds.grid([64], [64]))]
WANTED = read_plan.Wanted.from_boxes([("w", boxes.whole([64]))], contents=WHOLE)


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


def test_the_nearest_copy_is_read_and_the_others_are_next():
    reader = SAVED[2].host
    near = read_plan.Nearness(StepTable(SAVED), reader)
    plan = read_plan.ReadPlan(near, WANTED)
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
    plan = read_plan.ReadPlan(near, WANTED)
    pieces = [
        (plan.read(n).piece, near.holders_of(item)[0])
        for n, item in enumerate(plan.item)
    ]
    assert sorted(
        (piece.start[0], piece.stop[0], holder) for piece, holder in pieces
    ) == [(0, 3, 2), (3, 9, 0), (9, 32, 2), (32, 64, 2)]


def test_what_was_not_saved_or_is_lost_cannot_be_wanted():
    lone = saved_worlds.saved_by(saved_worlds.host(0), WHOLE, EVERY[:-1])
    near = read_plan.Nearness(StepTable([lone]), lone.host)
    with pytest.raises(errors.CheckpointError, match=r"w\[63:64\].*complete step"):
        read_plan.ReadPlan(near, WANTED)
    with pytest.raises(
        errors.CheckpointError, match=r"no leaf 'v'; its leaves are \['data/"
    ):
        read_plan.Wanted.from_boxes([("v", boxes.whole([64]))], contents=WHOLE)
    for shape in ([65], [8, 8]):
        with pytest.raises(errors.CheckpointError, match=r"array, w\[0:64\]; request"):
            read_plan.Wanted.from_boxes([("w", boxes.whole(shape))], contents=WHOLE)
