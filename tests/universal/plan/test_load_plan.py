"""Plans, carried out on bytes in memory and compared with NumPy."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.universal import moves, stored
from elastic_ckpt.universal.plan import load_plan, spans
from tests.universal import random_layouts


def cut(shape, bounds):
    """The boxes of a grid that begins at `bounds` in each dim."""
    grid = [boxes.whole(())]
    for size, bounds_of_dim in zip(shape, bounds, strict=True):
        bounds_of_dim = [*sorted({place % size for place in bounds_of_dim} | {0}), size]
        grid = [
            boxes.Box(start=(*box.start, a), stop=(*box.stop, b))
            for box in grid
            for a, b in itertools.pairwise(bounds_of_dim)
        ]
    return grid


@st.composite
def needs(draw, layout):
    """Boxes of the targets that a host needs."""
    needed = {}
    for tensor in layout.target_tensors():
        bounds = [draw(st.sets(st.integers(0, 10), max_size=2)) for _ in tensor.shape]
        grid = cut(tensor.shape, bounds)
        chosen = draw(st.sets(st.sampled_from(grid), max_size=4))
        needed[tensor] = [box for box in grid if box in chosen]
    return needed


def carried_out(plan, files):
    """The buffers of a plan, filled by its copies."""
    buffers = [np.zeros(buffer.box.volume, buffer.dtype) for buffer in plan.buffers]
    spans = plan.spans
    for span in range(len(spans)):
        start, stop = int(spans.start[span]), int(spans.stop[span])
        content = files[plan.files[spans.file[span]]][start:stop]
        assert len(content) == stop - start
        for copy in range(spans.first_copy[span], spans.first_copy[span + 1]):
            form = spans.forms[spans.form[copy]]
            values = np.ndarray(
                form.sizes,
                form.dtype,
                content,
                int(spans.source[copy]) - start,
                form.source_strides,
            )
            into = buffers[spans.buffer[copy]]
            strides = [each * into.itemsize for each in form.buffer_strides]
            place = int(spans.element[copy]) * into.itemsize
            np.ndarray(form.sizes, into.dtype, into, place, strides)[...] = values
    return [
        values.reshape(buffer.box.shape)
        for values, buffer in zip(buffers, plan.buffers, strict=True)
    ]


@given(data=st.data(), layout=random_layouts.layouts())
def test_every_needed_box_gets_the_values_of_its_sources(data, layout):
    limits = spans.Limits(
        gap_bytes=data.draw(st.sampled_from([0, 4, 30, 10**9])),
        span_bytes=data.draw(st.sampled_from([1, 10, 64, 10**9])),
    )
    needed = data.draw(needs(layout))
    plan = load_plan.plan(
        layout.tensors, layout.moves, [], needed, limits=lambda _: limits
    )
    for buffer, values in zip(
        plan.buffers, carried_out(plan, layout.files), strict=True
    ):
        place = tuple(map(slice, buffer.box.start, buffer.box.stop))
        expected = layout.targets[buffer.tensor.name][place]
        assert values.tobytes() == expected.tobytes()


@given(data=st.data(), layout=random_layouts.layouts())
def test_without_gaps_each_needed_byte_is_read_once_and_no_other(data, layout):
    limits = spans.Limits(gap_bytes=0, span_bytes=64)
    needed = data.draw(needs(layout))
    plan = load_plan.plan(
        layout.tensors, layout.moves, [], needed, limits=lambda _: limits
    )
    sizes = [
        sum(box.volume for box in of_tensor) * tensor.dtype.itemsize
        for tensor, of_tensor in needed.items()
    ]
    total = plan.total()
    assert total.read_bytes == total.needed_bytes == sum(sizes)
    read = [
        (file, byte)
        for file, start, stop in zip(
            plan.spans.file, plan.spans.start, plan.spans.stop, strict=True
        )
        for byte in range(start, stop)
    ]
    assert len(read) == len(set(read))


@given(data=st.data(), layout=random_layouts.layouts())
def test_a_plan_without_one_of_its_moves_is_refused(data, layout):
    left = data.draw(st.sampled_from(layout.moves))
    needed = {tensor: [boxes.whole(tensor.shape)] for tensor in layout.target_tensors()}
    kept = [move for move in layout.moves if move is not left]
    with pytest.raises(errors.CheckpointError, match=f"{left.target}.*nothing fills"):
        load_plan.plan(layout.tensors, kept, [], needed)


@given(data=st.data(), layout=random_layouts.layouts())
def test_a_plan_with_one_of_its_moves_twice_is_refused(data, layout):
    doubled = data.draw(st.sampled_from(layout.moves))
    needed = {tensor: [boxes.whole(tensor.shape)] for tensor in layout.target_tensors()}
    with pytest.raises(errors.CheckpointError, match=f"{doubled.target}.*twice"):
        load_plan.plan(layout.tensors, [*layout.moves, doubled], [], needed)


def matrix(rows, columns, *, file="a.bin", offset=0):
    return stored.StoredTensor(
        name="w",
        dtype=np.dtype("float32"),
        shape=(rows, columns),
        fragments=(
            stored.Fragment(
                box=boxes.whole((rows, columns)),
                file=file,
                offset=offset,
                strides=(4 * columns, 4),
            ),
        ),
    )


def whole_move(sizes, *, source=0, target="w", source_dims=(0, 1), target_dims=(0, 1)):
    zeros = (0,) * len(sizes)
    return moves.Move(
        target=target,
        sizes=sizes,
        sources=(
            moves.Source(
                tensor=source,
                side=moves.Side(start=zeros, dims=source_dims, steps=(1, 1)),
            ),
        ),
        target_side=moves.Side(start=zeros, dims=target_dims, steps=(1, 1)),
    )


def target(*shape, name="w"):
    return moves.TargetTensor(name=name, dtype=np.dtype("float32"), shape=shape)


def test_fragments_that_have_elements_twice_are_refused():
    tensor = matrix(2, 4)
    (fragment,) = tensor.fragments
    row = dataclasses.replace(fragment, box=boxes.Box(start=(0, 0), stop=(1, 4)))
    twice = dataclasses.replace(tensor, fragments=(row, row))
    with pytest.raises(errors.CheckpointError, match=r"hold some .* twice"):
        load_plan.plan(
            [twice], [whole_move((2, 4))], [], {target(2, 4): [boxes.whole((2, 4))]}
        )


def test_a_part_that_no_source_has_can_be_filled_with_a_value():
    fill = moves.Fill(target="w", start=(2, 0), stop=(3, 4), value=7)
    needed = {target(3, 4): [boxes.Box(start=(1, 1), stop=(3, 3))]}
    plan = load_plan.plan([matrix(2, 4)], [whole_move((2, 4))], [fill], needed)
    (part,) = plan.fills
    assert part.place == (slice(1, 2), slice(0, 2))
    assert plan.total().needed_bytes == 2 * 4


def test_fragments_that_leave_out_elements_are_reported_with_the_tensors_name():
    tensor = matrix(2, 4)
    short = stored.StoredTensor(
        name="w",
        ranks=(("tp", 1),),
        dtype=tensor.dtype,
        shape=(3, 4),
        fragments=tensor.fragments,
    )
    needed = {target(3, 4): [boxes.whole((3, 4))]}
    with pytest.raises(errors.CheckpointError, match=r"w \{'tp': 1\}.* 8 of 12"):
        load_plan.plan([short], [whole_move((3, 4))], [], needed)


def test_outer_shards_read_what_they_need_in_few_requests():
    rows, columns = 8 * 1024, 1024
    needed = {target(rows, columns): [boxes.Box(start=(1024, 0), stop=(2048, 1024))]}
    move = whole_move((rows, columns))
    total = load_plan.plan([matrix(rows, columns)], [move], [], needed).total()
    assert total.read_bytes == total.needed_bytes == 4 * 2**20
    assert total.requests == 1


def test_inner_shards_in_a_bucket_read_past_small_gaps():
    rows, columns = 1024, 1024
    needed = {target(rows, columns): [boxes.Box(start=(0, 0), stop=(rows, 128))]}
    tensor = matrix(rows, columns, file="gs://bucket/a.bin")
    total = load_plan.plan([tensor], [whole_move((rows, columns))], [], needed).total()
    assert total.requests == 1
    assert total.needed_bytes == 2**19


@pytest.mark.parametrize("hosts", [2, 8])
def test_the_parts_of_all_hosts_are_the_whole(hosts):
    rows, columns = 4096, 512
    target_shape = (columns, rows)
    move = whole_move((rows, columns), target_dims=(1, 0))
    read = 0
    for host in range(hosts):
        part = columns // hosts
        box = boxes.Box(start=(host * part, 0), stop=((host + 1) * part, rows))
        needed = {target(*target_shape): [box]}
        tensor = matrix(rows, columns)
        # A column of a host is less than a gap.
        plan = load_plan.plan(
            [tensor],
            [move],
            [],
            needed,
            limits=lambda _: spans.Limits(gap_bytes=0, span_bytes=2**23),
        )
        read += plan.total().read_bytes
    assert read == math.prod(target_shape) * 4


def test_sources_that_are_reduced_get_a_layer_each():
    arithmetic = moves.Arithmetic(reduction=moves.Reduction.MEAN)
    tensors = [matrix(2, 4), matrix(2, 4, offset=64)]
    move = whole_move((2, 4), target_dims=(1, 0))
    reduced = [
        dataclasses.replace(
            move,
            sources=tuple(
                moves.Source(tensor=source, side=move.source_side)
                for source in range(2)
            ),
            arithmetic=arithmetic,
        )
    ]
    needed = {target(4, 2): [boxes.whole((4, 2))]}
    plan = load_plan.plan(tensors, reduced, [], needed)
    (region,) = plan.regions
    assert region.buffer == 0
    assert region.layers == (1, 2)
    assert plan.total().needed_bytes == 2 * 32
    for layer in region.layers:
        assert plan.buffers[layer].box == boxes.whole((2, 4))
