"""Plans, their budget and their checksums, on bytes in memory and small files."""

import dataclasses
import itertools
import math
import queue
import threading
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.universal import moves
from elastic_ckpt.universal.flat_ranges import boxes_of_range
from elastic_ckpt.universal.formats import checkpoint as stored
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.plan import load_plan, spans
from elastic_ckpt.universal.reading import read_checks
from elastic_ckpt.universal.reading.byte_source import LocalFiles
from elastic_ckpt.universal.reading.in_flight import InFlight
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.reading.transfer import Transfer
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


def read_bytes(plan):
    return int((plan.spans.stop - plan.spans.start).sum())


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
    sizes = [
        sum(box.volume for box in of_tensor) * tensor.dtype.itemsize
        for tensor, of_tensor in needed.items()
    ]
    if limits.gap_bytes == 0:
        # Each needed byte is read once, and no other.
        assert read_bytes(plan) == sum(sizes)
        ranges = zip(plan.spans.file, plan.spans.start, plan.spans.stop, strict=True)
        read = [(file, n) for file, start, stop in ranges for n in range(start, stop)]
        assert len(read) == len(set(read))


@settings(max_examples=10)
@given(data=st.data(), layout=random_layouts.layouts())
def test_a_plan_that_lacks_a_move_or_has_one_twice_is_refused(data, layout):
    chosen = data.draw(st.sampled_from(layout.moves))
    needed = {tensor: [boxes.whole(tensor.shape)] for tensor in layout.target_tensors()}
    kept = [move for move in layout.moves if move is not chosen]
    with pytest.raises(errors.CheckpointError, match=f"{chosen.target}.*nothing fills"):
        load_plan.plan(layout.tensors, kept, [], needed)
    with pytest.raises(errors.CheckpointError, match=f"{chosen.target}.*twice"):
        load_plan.plan(layout.tensors, [*layout.moves, chosen], [], needed)


def matrix(rows, columns, *, file="a.bin"):
    return stored.StoredTensor(
        name="w",
        dtype=np.dtype("float32"),
        shape=(rows, columns),
        fragments=(
            stored.Fragment(
                box=boxes.whole((rows, columns)),
                file=file,
                offset=0,
                strides=(4 * columns, 4),
            ),
        ),
    )


def whole_move(sizes):
    side = moves.Side(
        start=(0,) * len(sizes), dims=tuple(range(len(sizes))), steps=(1,) * len(sizes)
    )
    source = moves.Source(tensor=0, side=side)
    return moves.Move(target="w", sizes=sizes, sources=(source,), target_side=side)


def target(*shape, dtype="float32"):
    return moves.TargetTensor(name="w", dtype=np.dtype(dtype), shape=shape)


def test_fragments_that_overlap_or_leave_out_elements_are_refused():
    tensor = matrix(2, 4)
    (fragment,) = tensor.fragments
    row = dataclasses.replace(fragment, box=boxes.Box(start=(0, 0), stop=(1, 4)))
    twice = dataclasses.replace(tensor, fragments=(row, row))
    needed = {target(2, 4): [boxes.whole((2, 4))]}
    with pytest.raises(errors.CheckpointError, match=r"hold some .* twice"):
        load_plan.plan([twice], [whole_move((2, 4))], [], needed)
    short = dataclasses.replace(tensor, ranks=(("tp", 1),), shape=(3, 4))
    needed = {target(3, 4): [boxes.whole((3, 4))]}
    with pytest.raises(errors.CheckpointError, match=r"w \{'tp': 1\}.* 8 of 12"):
        load_plan.plan([short], [whole_move((3, 4))], [], needed)


def test_a_part_that_no_source_has_can_be_filled_with_a_value():
    fill = moves.Fill(target="w", start=(2, 0), stop=(3, 4), value=7)
    needed = {target(3, 4): [boxes.Box(start=(1, 1), stop=(3, 3))]}
    plan = load_plan.plan([matrix(2, 4)], [whole_move((2, 4))], [fill], needed)
    (part,) = plan.fills
    assert part.place == (slice(1, 2), slice(0, 2))
    assert read_bytes(plan) == 2 * 4


def test_a_shard_of_rows_is_one_request_and_a_bucket_is_read_past_small_gaps():
    rows, columns = 8 * 1024, 1024
    move = whole_move((rows, columns))
    needed = {target(rows, columns): [boxes.Box(start=(1024, 0), stop=(2048, 1024))]}
    plan = load_plan.plan([matrix(rows, columns)], [move], [], needed)
    assert (len(plan.spans), read_bytes(plan)) == (1, 4 * 2**20)
    needed = {target(rows, columns): [boxes.Box(start=(0, 0), stop=(1024, 128))]}
    tensor = matrix(rows, columns, file="gs://bucket/a.bin")
    plan = load_plan.plan([tensor], [move], [], needed)
    assert (len(plan.spans), read_bytes(plan)) == (1, 4 * (1023 * columns + 128))


def test_a_gap_in_a_large_dim_is_refused_within_little_memory():
    size = 2**40
    box = boxes.whole((size,))
    fragment = stored.Fragment(box=box, file="x", offset=0, strides=(1,))
    tensor = stored.StoredTensor(
        name="w", dtype=np.dtype(np.uint8), shape=(size,), fragments=(fragment,)
    )
    needed = {target(size, dtype="uint8"): [box]}
    tracemalloc.start()
    try:
        with pytest.raises(
            errors.CheckpointError, match="nothing fills 1 of its elements"
        ):
            load_plan.plan([tensor], [whole_move((size - 1,))], [], needed)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@st.composite
def flat_ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    bounds = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(bounds), draw(bounds)))
    return shape, start, stop


@given(flat_ranges())
def test_boxes_of_a_flat_range_hold_its_elements_in_order(case):
    shape, start, stop = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    made = boxes_of_range(shape, start, stop)
    parts = [
        elements[tuple(map(slice, box.start, box.stop))].reshape(-1) for box in made
    ]
    assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(start, stop))
    assert len(made) <= max(1, 2 * len(shape) - 1)


@pytest.fixture
def requested(monkeypatch):
    """Begins a request in a thread; returns it, and what happens to it."""
    happened = queue.SimpleQueue()
    wait = threading.Condition.wait

    def noted(self, timeout=None):
        if threading.current_thread().name == "request":
            happened.put("waits")
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", noted)

    def start(in_flight, *request):
        def begin():
            happened.put("admitted" if in_flight.begin(*request) else "refused")

        thread = threading.Thread(target=begin, name="request")
        thread.start()
        return thread, happened

    return start


def test_a_request_waits_until_its_bytes_fit_and_is_admitted_alone_if_they_never_do(
    requested,
):
    in_flight = InFlight(10)
    assert in_flight.begin(100, 0)
    thread, happened = requested(in_flight, 1, 0)
    assert happened.get() == "waits"
    in_flight.done(100)
    thread.join()
    assert happened.get() == "admitted"


def test_bytes_of_buffers_are_in_flight_until_they_are_handed_on(requested):
    in_flight = InFlight(10)
    assert in_flight.begin(1, 10)
    in_flight.done(1, completed=1)
    thread, happened = requested(in_flight, 1, 10)
    assert happened.get() == "waits"
    in_flight.handed_on(10, completed=1)
    thread.join()
    assert happened.get() == "admitted"


def test_buffers_that_wait_for_further_requests_do_not_block_them():
    in_flight = InFlight(10)
    assert in_flight.begin(1, 100)
    in_flight.done(1)
    # The first buffer is complete in part alone: only this request can go on.
    assert in_flight.begin(1, 100)
    assert in_flight.peak_bytes == 201


def test_a_request_that_waits_is_refused_at_the_end(requested):
    in_flight = InFlight(10)
    assert in_flight.begin(10, 10)
    thread, happened = requested(in_flight, 10, 10)
    assert happened.get() == "waits"
    in_flight.end()
    thread.join()
    assert happened.get() == "refused"


def test_memory_is_taken_again_and_the_oldest_over_the_limit_is_freed():
    size = 2**21
    memory = ReusedMemory(2 * size)
    taken = [memory.take(size) for _ in range(3)]
    addresses = [each.ctypes.data for each in taken]
    for each in taken:
        memory.give_back(each)
    again = [memory.take(size) for _ in range(2)]
    assert {each.ctypes.data for each in again} == set(addresses[1:])
    assert all((each.dtype, each.shape) == (np.uint8, (size,)) for each in again)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_the_crc_of_parts_is_that_of_the_whole(parts):
    crc = 0
    for part in parts:
        crc = read_checks.combined(crc, zlib.crc32(part), len(part))
    assert crc == zlib.crc32(b"".join(parts))


@st.composite
def checked_files(draw):
    """The size of a file, the bounds of its entries, and what is needed of it."""
    size = draw(st.integers(1, 60))
    ends = st.integers(0, size)
    bounds = sorted({0, size, *draw(st.sets(ends, max_size=3))})
    pairs = draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=6))
    needed = sorted({(min(p), max(p)) for p in pairs if p[0] != p[1]})
    return size, bounds, needed, draw(st.integers(0, size - 1))


def read_checked(path, checksums, needed):
    """The bytes of ranges of a file, with its checksums compared."""
    size = path.stat().st_size
    fragment = stored.Fragment(
        box=boxes.whole((size,)), file=str(path), offset=0, strides=(1,)
    )
    tensor = stored.StoredTensor(
        name="w", dtype=np.dtype(np.uint8), shape=(size,), fragments=(fragment,)
    )
    checkpoint = stored.Checkpoint(
        format="test", tensors=[tensor], checksums=lambda _: checksums
    )
    parts = [boxes.Box(start=(a,), stop=(b,)) for a, b in needed]
    plan = load_plan.plan(
        [tensor], [whole_move((size,))], [], {target(size, dtype="uint8"): parts}
    )
    checks = read_checks.ReadChecks(checkpoint, plan, plan.files)
    source = LocalFiles()
    transfer = Transfer(
        plan,
        lambda _: source,
        budget_bytes=2**20,
        is_staged=lambda _: False,
        note=checks.note,
    )
    values = {number: bytes(each) for number, each in transfer.buffers()}
    checks.finish()
    assert read_bytes(plan) + checks.extra_bytes <= size
    return [values[number] for number in range(len(parts))]


@given(checked_files())
def test_damage_of_an_entry_is_seen_by_who_reads_some_of_it(tmp_path_factory, case):
    size, bounds, needed, at = case
    path = tmp_path_factory.mktemp("files") / "x"
    content = bytearray(range(size))
    path.write_bytes(content)
    checksums = [
        stored.Checksum(a, b, zlib.crc32(content[a:b]))
        for a, b in itertools.pairwise(bounds)
    ]
    assert read_checked(path, checksums, needed) == [content[a:b] for a, b in needed]
    content[at] ^= 1
    path.write_bytes(content)
    first = max(bound for bound in bounds[:-1] if bound <= at)
    last = min(bound for bound in bounds if bound > at)
    # What lies between is so little that it is read, too.
    if needed and needed[0][0] < last and first < max(b for _, b in needed):
        with pytest.raises(FormatError, match=f"bytes {first} to {last}"):
            read_checked(path, checksums, needed)
    else:
        read_checked(path, checksums, needed)
