"""What is read of random checkpoints, in any cut, compared with NumPy bit for bit."""

import dataclasses
import functools
import itertools
import math
import os
import threading
import weakref
import zlib
from unittest import mock

import fsspec
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, errors, host_memory
from elastic_ckpt.universal.factors import boxes_of_range
from elastic_ckpt.universal.formats import checkpoint as stored
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.moves import Derived, Fill, Operand
from elastic_ckpt.universal.reading import sources
from elastic_ckpt.universal.reading.sources import Limits, Sources
from tests.universal import random_layouts
from tests.universal.reading.files import (
    Files,
    cut,
    move,
    read_all,
    read_units,
    reader_of,
    target_of,
)

F32 = np.dtype("float32")
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def requests(monkeypatch):
    """The file and the range of each request, in the order of their ends."""
    made = []
    read_into = Sources.read_into

    def noted(self, file, start, memory):
        made.append((file, start, start + memory.nbytes))
        return read_into(self, file, start, memory)

    monkeypatch.setattr(Sources, "read_into", noted)
    return made


def drawn(*shape, dtype=F32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def written(layout, directory):
    """The tensors of a layout, in files of a directory."""
    for name, content in layout.files.items():
        (directory / name).write_bytes(content)

    def placed(fragment):
        return dataclasses.replace(fragment, file=str(directory / fragment.file))

    return [
        dataclasses.replace(each, fragments=tuple(map(placed, each.fragments)))
        for each in layout.tensors
    ]


def with_replicas(draw, layout):
    """Some moves from tensors that are compared with replicas of themselves."""
    derived, moves = [], []
    for each in layout.moves:
        if draw(st.booleans()):
            rank = len(layout.tensors[each.source].shape)
            operand = Operand(each.source, tuple(range(rank)), (1,) * rank)
            tensor = layout.tensors[each.source]
            number = len(layout.tensors) + len(derived)
            derived.append(
                Derived(
                    how="equal",
                    operands=(operand,) * draw(st.integers(1, 3)),
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                )
            )
            each = dataclasses.replace(each, source=number)
        moves.append(each)
    return moves, derived


@st.composite
def units(draw, targets):
    """Boxes of targets that a host needs, some of them together."""
    made = []
    for target in targets:
        bounds = [draw(st.sets(st.integers(0, 10), max_size=2)) for _ in target.shape]
        grid = cut(target.shape, bounds)
        chosen = draw(st.sets(st.sampled_from(grid), max_size=4))
        needed = [box for box in grid if box in chosen]
        if draw(st.booleans()):
            made.append((target, needed))
        else:
            made += [(target, [box]) for box in needed]
    return made


small = st.sampled_from([1, 10, 64, 2**40])


@given(data=st.data(), layout=random_layouts.layouts(("float32", "uint16", "int8")))
def test_every_needed_box_gets_the_values_of_its_sources(
    tmp_path_factory, data, layout
):
    tensors = written(layout, tmp_path_factory.mktemp("files"))
    moves, derived = with_replicas(data.draw, layout)
    targets = layout.target_tensors()
    needed = data.draw(units(targets))
    gap_bytes = data.draw(st.sampled_from([0, 4, 30, 2**40]))
    limits = Limits(gap_bytes, data.draw(small), 0)
    with (
        mock.patch.object(sources, "LOCAL", limits),
        mock.patch.object(sources, "PART_BYTES", data.draw(small)),
    ):
        reader = reader_of(
            tensors, moves, targets, derived=derived, budget_bytes=data.draw(small)
        )
        read = read_units(reader, needed)
        _, spans = reader.planned(needed)
    assert [(t, box) for t, box, _ in read] == [(t, b) for t, bs in needed for b in bs]
    for target, box, values in read:
        place = tuple(map(slice, box.start, box.stop))
        assert values.tobytes() == layout.targets[target.name][place].tobytes()
    if gap_bytes == 0 and not derived:
        # Each needed byte is read once, and no other.
        num_bytes = sum(values.nbytes for *_, values in read)
        assert sum(span.stop - span.start for span in spans) == num_bytes


@settings(max_examples=10)
@given(data=st.data(), layout=random_layouts.layouts())
def test_a_target_that_lacks_a_move_or_has_one_twice_is_refused(data, layout):
    chosen = data.draw(st.sampled_from(layout.moves))
    targets = layout.target_tensors()
    kept = [each for each in layout.moves if each is not chosen]
    for moves, problem in ((kept, "nothing"), ([*kept, chosen, chosen], "two sources")):
        with pytest.raises(
            errors.CheckpointError, match=f"{chosen.target}.*filled by {problem}"
        ):
            read_all(layout.tensors, moves, targets)


def test_a_part_that_no_source_has_is_filled_with_a_value(files):
    values = drawn(2, 4)
    files.add(values)
    fill = Fill(target="w", start=(2, 0), stop=(3, 4), value=7)
    target = target_of(3, 4)
    moves = [move(target_of(2, 4))]
    reader = reader_of(files.tensors, moves, [target], fills=[fill])
    box = boxes.Box(start=(1, 1), stop=(3, 3))
    ((_, _, read),) = read_units(reader, [(target, [box])])
    assert read.tolist() == [values[1, 1:3].tolist(), [7, 7]]
    target = dataclasses.replace(target, dtype=np.dtype("float16"))
    large = dataclasses.replace(fill, value=1e9)
    reader = reader_of(files.tensors, moves, [target], fills=[large])
    with pytest.raises(errors.CheckpointError, match=r"w: 1000000000.0 is no float16"):
        read_units(reader, [(target, [box])])


# What is computed.


def operand(number, *dims, blocks=None, viewed_as=None):
    blocks = (1,) * len(dims) if blocks is None else blocks
    return Operand(number, dims, blocks, viewed_as)


def derived_of(how, operands, values, **options):
    """A derived tensor like the array that it should be."""
    return Derived(
        how=how, operands=operands, shape=values.shape, dtype=values.dtype, **options
    )


def of_ranks(draw, files, numbers, *, how):
    """The mean or the sum of what ranks have, one of them transposed."""
    out, inner, ranks = (draw(st.integers(1, 6)) for _ in range(3))
    dtype = np.dtype(draw(st.sampled_from([F32, BF16, "int8", "int64"])))
    every = [numbers((out, inner), dtype) for _ in range(ranks)]
    for values in every:
        files.add(values)
    every.append(numbers((inner, out), dtype))
    files.add(every[-1])
    every[-1] = every[-1].T
    operands = [*(operand(n, 0, 1) for n in range(ranks)), operand(ranks, 1, 0)]
    wide = F32 if dtype in (F32, BF16) else np.dtype("float64")
    if how == "sum" and wide != F32:
        wide = np.dtype("int64")
    total = every[0].astype(wide)
    for values in every[1:]:
        total = total + values.astype(wide)
    if how == "mean":
        total = total / np.array(len(every), wide)
    return derived_of(how, operands, total), total


def with_scales(draw, files, numbers):
    """A weight in blocks, times a scale of each, and of each of its rows."""
    out, inner, o, i = (draw(st.integers(1, 7)) for _ in range(4))
    dtype = draw(st.sampled_from([ml_dtypes.float8_e4m3fn, np.int8]))
    weight = numbers((out, inner), dtype)
    scales = numbers((-(-inner // i), -(-out // o)), BF16)
    rows = numbers((out,), F32)
    for values in (weight, scales, rows):
        files.add(values)
    operands = [operand(0, 0, 1), operand(1, 1, 0, blocks=(i, o)), operand(2, 0)]
    of_elements = np.repeat(np.repeat(scales.T.astype(F32), o, 0), i, 1)[:out, :inner]
    product = weight.astype(F32) * of_elements * rows[:, None] * 2
    return derived_of("times", operands, product, factor=2.0), product


def of_halves(draw, files, numbers):
    """Numbers of four bits, two in a byte, with a scale for each group."""
    out, groups, half = (draw(st.integers(1, 4)) for _ in range(3))
    packed = numbers((out, groups * half), np.int8).view(np.uint8)
    scales = (numbers((out, groups), np.int16) + 127).astype(np.uint8)
    files.add(packed)
    files.add(scales)
    dtype = np.dtype(draw(st.sampled_from([ml_dtypes.float4_e2m1fn, ml_dtypes.int4])))
    parts = [each.view(dtype) for each in (packed & 15, packed >> 4)]
    values = np.stack(parts, -1).reshape(out, -1)
    bytes_of = operand(0, 0, 1, viewed_as=dtype)
    if draw(st.booleans()):
        return derived_of("equal", [bytes_of], values), values
    exponents = operand(
        1, 0, 1, blocks=(1, 2 * half), viewed_as=np.dtype(ml_dtypes.float8_e8m0fnu)
    )
    powers = np.exp2(scales.astype(F32) - 127).repeat(2 * half, 1)
    product = values.astype(F32) * powers
    return derived_of("times", [bytes_of, exponents], product), product


def with_product(draw, files, numbers):
    """A weight and the product of two small matrices."""
    out, inner, rank = (draw(st.integers(1, 5)) for _ in range(3))
    weight, b, a = (
        numbers(shape, BF16) for shape in ((out, inner), (out, rank), (rank, inner))
    )
    for values in (weight, b, a):
        files.add(values)
    operands = [operand(0, 0, 1), operand(1, 0, -1), operand(2, -1, 1)]
    total = weight.astype(F32) + 2 * b.astype(F32) @ a.astype(F32)
    return derived_of("plus", operands, total, factor=2.0), total


KINDS = {
    "mean": functools.partial(of_ranks, how="mean"),
    "sum": functools.partial(of_ranks, how="sum"),
    "times": with_scales,
    "halves": of_halves,
    "plus": with_product,
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_derived_tensors_are_what_numpy_computes_in_any_cut(
    tmp_path_factory, kind, data, seed
):
    files = Files(tmp_path_factory.mktemp("files"))
    generator = np.random.default_rng(seed)

    def numbers(shape, dtype):
        return generator.integers(-8, 9, shape).astype(dtype)

    spec, expected = KINDS[kind](data.draw, files, numbers)
    target = target_of(*expected.shape, dtype=expected.dtype)
    needed = data.draw(units([target]))
    with mock.patch.object(sources, "PART_BYTES", data.draw(small)):
        moves = [move(target, source=len(files.tensors))]
        reader = reader_of(files.tensors, moves, [target], derived=[spec])
        read = read_units(reader, needed)
    for _, box, values in read:
        place = tuple(map(slice, box.start, box.stop))
        assert values.tobytes() == expected[place].tobytes()


def test_a_part_of_a_derived_tensor_is_computed_once_for_all_boxes(files, requests):
    values = drawn(64, 32)
    path = files.add(values)
    target = target_of(64, 32)
    spec = derived_of("equal", [operand(0, 0, 1)] * 2, values)
    reader = reader_of(
        files.tensors, [move(target, source=1)], [target], derived=[spec]
    )
    columns = cut((64, 32), [(), (8, 16, 24)])
    read = read_units(reader, [(target, columns)])
    assert [each.tolist() for *_, each in read] == [
        values[:, at : at + 8].tolist() for at in range(0, 32, 8)
    ]
    assert [each for each in requests if each[0] == path] == [
        (path, 0, values.nbytes)
    ] * 2


def test_scale_and_shift_are_computed_in_float32(files):
    values = drawn(4, 5, dtype=BF16)
    files.add(values)
    read = files.read(target_of(4, 5, dtype=BF16), scale=3.7, shift=-1.25)
    expected = values.astype(F32) * np.float32(3.7) + np.float32(-1.25)
    assert read.tobytes() == expected.astype(BF16).tobytes()


def test_views_of_complex_numbers_are_conjugates_and_negatives(files):
    values = np.array([1 + 2j, 3 - 4j], np.complex64)
    files.add(values, view="conj neg")
    read = files.read(target_of(2, dtype="complex64"))
    assert read.tobytes() == (-np.conj(values)).tobytes()


@pytest.mark.parametrize(
    ("value", "dtype", "target"),
    [
        (300, "int32", "uint8"),
        (2, "int8", "bool"),
        (0.5, "float32", "int32"),
        (1e30, "float32", "float16"),
        (1j, "complex64", "float32"),
        (1.5, "complex64", "int32"),
        (100, "float32", "float4_e2m1fn"),
        (-128, "int8", "float4_e2m1fn"),
    ],
)
def test_a_value_that_is_none_of_the_target_is_named(files, value, dtype, target):
    files.add(np.array([0, value], dtype))
    with pytest.raises(errors.CheckpointError, match=f"w: .* is no {target}"):
        files.read(target_of(2, dtype=target))


def test_integers_of_four_bits_are_added_up(files):
    values = np.array([7, -8], ml_dtypes.int4)
    for _ in range(2):
        files.add(values)
    spec = derived_of("sum", [operand(0, 0), operand(1, 0)], np.zeros(2, np.int64))
    assert files.read(target_of(2, dtype="int64"), [spec]).tolist() == [14, -16]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_a_tensor_without_elements_has_no_parts(shape):
    tensor = stored.StoredTensor(name="w", dtype=F32, shape=shape)
    assert sources.in_parts(0, tensor, (1, 1), lambda *_: None, {}) == tensor


def test_integers_of_64_bits_are_added_up_exactly_and_not_rounded(files):
    for _ in range(2):
        files.add(np.array([2**62 - 1, 2**53 + 1]))
    wide = np.zeros(2, np.int64)
    target, both = target_of(2, dtype="int64"), [operand(0, 0), operand(1, 0)]
    read = files.read(target, [derived_of("sum", both, wide)])
    assert read.tolist() == [2**63 - 2, 2**54 + 2]
    mean = derived_of("mean", both, wide.astype(float))
    with pytest.raises(errors.CheckpointError, match=f"{2**62 - 1} cannot be scaled"):
        files.read(target, [mean])
    files.add(np.array([2, 0]))
    with pytest.raises(errors.CheckpointError, match=r"w: .* is no int64"):
        files.read(target, [derived_of("sum", [*both, operand(2, 0)], wide)])


def test_replicas_that_differ_in_a_bit_are_named_with_the_first_index(files):
    values = np.zeros((30, 40), np.float32)
    values[3, 3] = np.nan
    files.add(values, ranks=(("tp", 0),))
    files.add(values, ranks=(("tp", 1),))
    both = [operand(0, 0, 1), operand(1, 0, 1)]
    read = files.read(target_of(30, 40), [derived_of("equal", both, values)])
    assert read.tobytes() == values.tobytes()
    values[2, 7] = values[4, 1] = -0.0
    files.add(values, ranks=(("tp", 2),))
    every = [*both, operand(2, 0, 1)]
    with pytest.raises(
        errors.CheckpointError,
        match=r"w of rank tp 0 and w of rank tp 2 differ at \[2, 7\]: 0.0 and -0.0",
    ):
        files.read(
            target_of(40, 30), [derived_of("equal", every, values)], order=(1, 0)
        )


def test_replicas_of_different_dtypes_are_refused(files):
    files.add(drawn(4))
    files.add(drawn(4, dtype=BF16), name="other")
    spec = derived_of("equal", [operand(0, 0), operand(1, 0)], drawn(4))
    with pytest.raises(
        errors.CheckpointError, match=r"w .* float32.* other .*bfloat16"
    ):
        files.read(target_of(4), [spec])


@pytest.mark.parametrize("dtype", [F32, BF16, np.dtype("int8")], ids=str)
def test_large_arrays_are_transposed_bit_for_bit(files, dtype):
    bits = np.random.default_rng(0).integers(0, 256, 130 * 70 * 190 * dtype.itemsize)
    values = bits.astype(np.uint8).view(dtype).reshape(130, 70, 190)
    files.add(values)
    for order in ((1, 0, 2), (2, 1, 0), (1, 2, 0)):
        moved = np.moveaxis(values, (0, 1, 2), order)
        read = files.read(target_of(*moved.shape, dtype=dtype), order=order)
        assert read.tobytes() == moved.tobytes()


# Requests and memory.


def test_a_shard_of_rows_is_one_request_and_a_bucket_is_read_past_small_gaps():
    rows, columns = 8 * 1024, 1024
    target = target_of(rows, columns)

    def spans(file, box):
        fragment = stored.Fragment(
            box=boxes.whole((rows, columns)),
            file=file,
            offset=0,
            strides=(4 * columns, 4),
        )
        tensor = stored.StoredTensor(
            name="w", dtype=F32, shape=(rows, columns), fragments=(fragment,)
        )
        _, made = reader_of([tensor], [move(target)], [target]).planned(
            [(target, [box])]
        )
        return [each.stop - each.start for each in made]

    rows_of_host = boxes.Box(start=(1024, 0), stop=(2048, 1024))
    assert spans("a.bin", rows_of_host) == [4 * 2**20]
    columns_of_host = boxes.Box(start=(0, 0), stop=(1024, 128))
    in_bucket = spans("gs://bucket/a.bin", columns_of_host)
    assert in_bucket == [4 * (1023 * columns + 128)]


def test_rows_that_are_far_apart_share_a_form(files):
    files.add(drawn(10, 9000))
    target = target_of(10, 9000)
    reader = reader_of(files.tensors, [move(target)], [target])
    box = boxes.Box(start=(0, 100), stop=(10, 200))
    _, spans = reader.planned([(target, [box])])
    copies = [copy for span in spans for copy in span.copies]
    assert len(copies) == 10
    assert len({id(copy.form) for copy in copies}) == 1


@pytest.mark.parametrize(
    ("order", "dtype", "times"),
    # A cast that is checked takes two times the memory of its request.
    [((0, 1), F32, 1), ((1, 0), F32, 1), ((0, 1), BF16, 3)],
)
def test_memory_of_requests_and_of_groups_keeps_to_the_budget(
    files, monkeypatch, order, dtype, times
):
    budget, shape = 2**20, (256, 256)
    held, peak, lock = [0, 0], [0, 0], threading.Lock()

    def count(kind, num_bytes):
        with lock:
            held[kind] += num_bytes
            peak[kind] = max(peak[kind], held[kind])

    def allocate(num_bytes):
        count(0, num_bytes)
        memory = host_memory.allocate(num_bytes)
        weakref.finalize(memory, count, 0, -num_bytes)
        return memory

    read_into = Sources.read_into

    def noted(self, file, start, memory):
        count(1, memory.nbytes)
        try:
            return read_into(self, file, start, memory)
        finally:
            count(1, -memory.nbytes)

    monkeypatch.setattr(Sources, "read_into", noted)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    targets, moves = [], []
    for number in range(20):
        files.add(drawn(*shape, seed=number))
        targets.append(target_of(*shape, dtype=dtype, name=str(number)))
        moves.append(move(targets[-1], source=number, order=order))
    reader = reader_of(
        files.tensors, moves, targets, budget_bytes=budget, allocate=allocate
    )
    units = [(each, [boxes.whole(shape)]) for each in targets]
    for number, group in enumerate(reader.read(units)):
        assert len(group) == budget // 2 // targets[0].num_bytes, number
    assert 0 < max(peak) <= budget
    assert peak[1] <= budget // times


# Files that cannot be read, and encoded arrays.


def test_a_file_that_is_cut_short_is_named_with_the_tensor_and_the_place(files):
    files.add(drawn(100, 10), name="encoder")
    file = files.add(drawn(100, 10), name="decoder")
    os.truncate(file, 3000)
    target = target_of(100, 10)
    with pytest.raises(
        FormatError,
        match=r"1.bin: decoder is at bytes 0 to 4000, but the file ends after 3000",
    ):
        files.read(target, source=1)
    os.remove(file)
    with pytest.raises(errors.CheckpointError, match=r"1.bin: decoder cannot be read"):
        files.read(target, source=1)


@pytest.mark.parametrize(
    "bucket", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True
)
def test_a_checkpoint_in_a_bucket_is_read_by_ranges(files, bucket):
    values = drawn(300, 200)
    file = files.add(values)
    system, path = fsspec.url_to_fs(f"{bucket}/w.bin")
    system.put_file(file, path)
    (tensor,) = files.tensors
    (fragment,) = tensor.fragments
    remote = dataclasses.replace(fragment, file=f"{bucket}/w.bin")
    files.tensors = [dataclasses.replace(tensor, fragments=(remote,))]
    moved = files.read(target_of(200, 300), order=(1, 0))
    assert moved.tobytes() == values.T.tobytes()
    target = target_of(300, 200)
    assert files.read(target).tobytes() == values.tobytes()
    system.pipe_file(path, values.tobytes()[:-400])
    with pytest.raises(FormatError, match=r"w.bin: w .* ends after 239600"):
        files.read(target)
    system.rm_file(path)
    with pytest.raises(errors.CheckpointError, match=r"w.bin: w cannot be read"):
        files.read(target)


@pytest.mark.parametrize("chunk", [(7, 5), (1, 96)], ids=str)
@pytest.mark.parametrize("is_derived", [False, True])
def test_encoded_arrays_are_read_through_tensorstore(files, chunk, is_derived):
    values = drawn(64, 96)
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{files.directory}/w/",
        "metadata": {
            "shape": [64, 96],
            "data_type": "float32",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(chunk)},
            },
            "codecs": [{"name": "bytes"}, {"name": "zstd"}],
        },
    }
    ts.open(spec, create=True).result().write(values).result()
    files.tensors.append(
        stored.StoredTensor(name="w", dtype=F32, shape=(64, 96), spec=spec)
    )
    derived = [derived_of("equal", [operand(0, 0, 1)] * 2, values)] * is_derived
    with mock.patch.object(sources, "PART_BYTES", 2**11):
        read = files.read(target_of(96, 64), derived, order=(1, 0))
    assert read.tobytes() == values.T.tobytes()
    files.tensors[0] = dataclasses.replace(files.tensors[0], shape=(64, 95))
    with pytest.raises(errors.CheckpointError, match=r"w is float32 \[64, 96\] in its"):
        files.read(target_of(95, 64), order=(1, 0))


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


@st.composite
def checked_files(draw):
    """The size of a file, the bounds of its entries, and what is needed of it."""
    size = draw(st.integers(1, 60))
    ends = st.integers(0, size)
    bounds = sorted({0, size, *draw(st.sets(ends, max_size=3))})
    pairs = draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=6))
    needed = [(min(p), max(p)) for p in pairs if p[0] != p[1]]
    return size, bounds, needed, draw(st.integers(0, size - 1))


@given(checked_files(), st.sampled_from([0, 2**14]))
def test_damage_of_an_entry_is_seen_whatever_is_read_of_it(
    tmp_path_factory, case, gap_bytes
):
    size, bounds, needed, at = case
    files = Files(tmp_path_factory.mktemp("files"))
    content = np.arange(size, dtype=np.uint8)
    path = files.add(content)
    entries = [
        stored.Checksum(a, b, zlib.crc32(content[a:b]))
        for a, b in itertools.pairwise(bounds)
    ]
    target = target_of(size, dtype="uint8")
    needed_boxes = [boxes.Box(start=(a,), stop=(b,)) for a, b in needed]

    def read():
        limits = Limits(gap_bytes, 2**23, 0)
        with mock.patch.object(sources, "LOCAL", limits):
            reader = reader_of(
                files.tensors, [move(target)], [target], checksums=lambda _: entries
            )
            found = read_units(reader, [(target, [box]) for box in needed_boxes[:1]])
            found += read_units(reader, [(target, needed_boxes[1:])])
        reader.checks.finish()
        return [each.tolist() for *_, each in found]

    assert read() == [content[a:b].tolist() for a, b in needed]
    content[at] ^= 1
    (files.directory / path).write_bytes(content.tobytes())
    first = max(bound for bound in bounds[:-1] if bound <= at)
    last = min(bound for bound in bounds if bound > at)
    with pytest.raises(FormatError, match=f"bytes {first} to {last}"):
        read()
