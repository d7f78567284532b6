"""Boxes against a brute-force oracle: an array of bools that is painted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import box_cover, box_join, boxes

SHAPES = st.lists(st.integers(0, 6), min_size=0, max_size=3)


def box_in(shape):
    ranges = [
        st.tuples(st.integers(0, dim), st.integers(0, dim)).map(sorted) for dim in shape
    ]
    return st.tuples(*ranges).map(
        lambda actual: boxes.Box(
            start=tuple(a for a, _ in actual), stop=tuple(b for _, b in actual)
        )
    )


@st.composite
def arrays(draw, most=8):
    shape = draw(SHAPES)
    return shape, draw(st.lists(box_in(shape), max_size=most))


def columns(shape, listed):
    return boxes.Boxes.from_boxes(listed, rank=len(shape))


def painted(shape, listed):
    """How many of the boxes each element is in."""
    counts = np.zeros(shape, int)
    for box in map(listed.__getitem__, range(len(listed))):
        counts[tuple(map(slice, box.start, box.stop))] += 1
    return counts


@given(arrays(most=2).filter(lambda array: len(array[1]) == 2))
def test_what_two_boxes_share_and_one_contains_and_one_lacks(array):
    shape, (a, b) = array
    in_a, in_b = painted(shape, [a]), painted(shape, [b])
    shared = boxes.intersect(a, b)
    assert (painted(shape, [shared] if shared else []) == in_a * in_b).all()
    assert (shared is not None) == (in_a * in_b).any()
    assert boxes.contains(a, b) == bool((in_a >= in_b).all())
    bare = box_cover.gaps(a, columns(shape, [b]))
    assert (painted(shape, bare) == in_a * (1 - in_b)).all()
    assert a.volume == in_a.sum()
    if shared:
        values = np.arange(in_a.size).reshape(shape)
        of_a = values[tuple(map(slice, a.start, a.stop))]
        of_shared = values[tuple(map(slice, shared.start, shared.stop))]
        assert (of_a[boxes.relative(shared, a)] == of_shared).all()


@pytest.mark.parametrize("most_cells", [2, box_cover._MAX_CELLS])
@given(array=arrays())
def test_gaps_are_what_no_box_covers_and_overlap_nowhere(most_cells, array):
    shape, listed = array
    with pytest.MonkeyPatch.context() as patch:
        # The array is halved where it has more cells.
        patch.setattr(box_cover, "_MAX_CELLS", most_cells)
        actual = box_cover.gaps(boxes.whole(shape), columns(shape, listed))
    assert (painted(shape, actual) == (painted(shape, listed) == 0)).all()
    assert (actual.volumes > 0).all()


@pytest.mark.parametrize("neighbours", [None, 0, 2**14])
@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 3),
    sizes=st.sampled_from([(8, 8), (3, 5), (0, 1), (300, 200), (90, 400)]),
    side=st.sampled_from([6, 60]),
)
def test_overlaps_are_the_pairs_that_share_an_element(
    neighbours, seed, rank, sizes, side
):
    generator = np.random.default_rng(seed)
    a, b = (
        boxes.Boxes(start=start, stop=start + generator.integers(0, 12, start.shape))
        for start in (generator.integers(0, side, (n, rank)) for n in sizes)
    )
    # Every pair is compared; or else few are, after halving or in a sweep.
    few_pairs = 2**20 if neighbours is None else sizes[0] * sizes[1] // 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_join, "_FEW_PAIRS", few_pairs)
        patch.setattr(box_join, "_MANY_PAIRS", few_pairs)
        patch.setattr(box_join, "_NEIGHBORS", neighbours)
        actual = box_join.overlaps(a, b)
    last, first = (
        np.minimum(a.stop[:, None], b.stop),
        np.maximum(a.start[:, None], b.start),
    )
    assert np.array_equal(actual, np.nonzero((first < last).all(axis=-1)))


@st.composite
def nearly_tiled(draw):
    """The boxes of a grid, of which one may be lacking, moved or cut."""
    shape = draw(st.lists(st.integers(1, 6), min_size=2, max_size=2))
    tile = [draw(st.integers(1, dim)) for dim in shape]
    starts = np.ndindex(
        *(-(-dim // side) for dim, side in zip(shape, tile, strict=True))
    )
    grid = [
        boxes.Box(
            start=start, stop=tuple(np.minimum(np.add(start, tile), shape).tolist())
        )
        for start in (tuple(np.multiply(each, tile).tolist()) for each in starts)
    ]
    if draw(st.booleans()):
        return shape, grid, True
    grid[draw(st.integers(0, len(grid) - 1))] = draw(box_in(shape))
    return shape, list(dict.fromkeys(grid)), False


@given(st.lists(nearly_tiled(), min_size=1, max_size=4))
def test_an_array_that_is_tiled_is_covered_once(arrays):
    shapes = np.array([shape for shape, _, _ in arrays])
    listed = [(n, box) for n, (_, held, _) in enumerate(arrays) for box in held]
    numbers = np.array([n for n, _ in listed])
    tiled = box_cover.tiled(
        shapes, numbers, columns(shapes[0], [box for _, box in listed])
    )
    for (shape, held, is_grid), said in zip(arrays, tiled.tolist(), strict=True):
        covered_once = bool((painted(shape, held) == 1).all())
        assert covered_once or not said
        assert said or not is_grid


def test_a_scalar_has_one_box_and_an_empty_array_needs_none():
    scalar = boxes.of_index((), ())
    assert (scalar.volume, str(scalar)) == (1, "[]")
    for shape, held, lacking in (((), [], 1), ((), [scalar], 0), ((3, 0), [], 0)):
        assert len(box_cover.gaps(boxes.whole(shape), columns(shape, held))) == lacking
    shapes = np.array([[1, 1], [3, 0], [0, 2]])
    whole = columns((1, 1), [boxes.whole((1, 1))])
    for of, tiled in ((0, [True] * 3), (1, [False, False, True])):
        assert box_cover.tiled(shapes, np.array([of]), whole).tolist() == tiled
    # An empty box is no tile.
    held = columns(
        (6,), [boxes.Box(start=(a,), stop=(b,)) for a, b in ((0, 3), (6, 6))]
    )
    assert not box_cover.tiled(np.array([[6]]), np.array([0, 0]), held).any()
    with pytest.raises(ValueError, match="a step is not 1"):
        boxes.of_index((slice(0, 8, 2),), (8,))
