import math
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import box_cover, boxes, errors
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.steps.step import StepId

SHAPES = st.lists(st.integers(1, 16), max_size=4).map(tuple)
PATHS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(SHAPES, st.sampled_from([1, 2, 4, 16]), st.integers(1, 4096))
def test_chunks_divide_a_shard_and_are_as_large_as_the_limit_lets_them(
    shard, item_bytes, chunk_bytes
):
    chunk = layout.chunk_shape(shard, item_bytes=item_bytes, chunk_bytes=chunk_bytes)
    assert len(chunk) == len(shard)
    assert all(size % part == 0 for size, part in zip(shard, chunk, strict=True))
    assert item_bytes * math.prod(chunk) <= max(chunk_bytes, item_bytes)
    # In one piece in memory wherever it was not the first dims that had to be whole.
    cut = [dim for dim, size in enumerate(shard) if chunk[dim] != size]
    if cut:
        of_last = item_bytes * math.prod(chunk[cut[-1] + 1 :])
        larger = [
            size
            for size in range(chunk[cut[-1]] + 1, shard[cut[-1]] + 1)
            if shard[cut[-1]] % size == 0
        ]
        assert all(size * of_last > chunk_bytes for size in larger)


def test_a_long_dim_is_cut_at_once_and_a_shard_off_the_grid_is_refused():
    assert layout.chunk_shape([2**40], item_bytes=4) == (2**24,)
    assert layout.chunk_shape([2**31 - 1], item_bytes=4) == (1,)
    box = boxes.Box(start=(3,), stop=(5,))
    with pytest.raises(errors.CheckpointError, match="all shards of an array"):
        list(layout.cut(box, (2,)))


@settings(max_examples=30)
@given(SHAPES, st.data())
def test_the_chunks_of_a_shard_cover_it_once(shard, data):
    place = [data.draw(st.integers(0, 3)) for _ in shard]
    start = tuple(n * size for n, size in zip(place, shard, strict=True))
    stop = tuple(a + size for a, size in zip(start, shard, strict=True))
    box = boxes.Box(start=start, stop=stop)
    chunk = layout.chunk_shape(shard, item_bytes=1, chunk_bytes=64)
    parts = list(layout.cut(box, chunk))
    assert sum(part.volume for part in parts) == box.volume
    assert not len(box_cover.gaps(box, boxes.Boxes.from_boxes(parts, rank=len(shard))))
    assert {part.shape for part in parts} == {chunk}
    leaf = Leaf(path="w", shape=stop, dtype="int8", chunk=chunk)
    files = {layout.part_file(leaf, part) for part in parts}
    assert len(files) == len(parts)


@given(PATHS, PATHS)
@example("", "%")
@example(".", "%2E")
@example("..", "%2E.")
@example("a" * 300, "a" * 301)
def test_each_leaf_has_a_directory_of_its_own_below_the_steps(one, other):
    place = layout.leaf_directory(one)
    assert os.path.normpath(os.path.join("/step", place)) == f"/step/{place}"
    assert all(0 < len(part) <= 255 for part in place.split("/"))
    assert "\0" not in place
    assert (place == layout.leaf_directory(other)) == (one == other)


@given(st.integers(0, 10**9), st.text("abc019-._", min_size=1))
def test_the_name_of_a_steps_directory_is_read_as_it_was_made(step, save):
    assert StepId.parse(str(StepId(step, save))) == (step, save)
    for name in ("1-a/../../x", "", "lock", "7", "7-", "-0", "07-0", "x-0", "٣-0"):
        assert StepId.parse(name) is None
