"""What is read of random checkpoints, in any cut, compared with NumPy bit for bit."""

import dataclasses
import itertools
import math
import os
import pathlib
import threading
import weakref
import zlib
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import boxes, errors, host_memory, storage
from elastic_ckpt.universal import loading
from elastic_ckpt.universal.factors import boxes_of_range
from elastic_ckpt.universal.formats import checkpoint as stored
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.moves import Derived, Fill, Operand
from elastic_ckpt.universal.reading import sources
from elastic_ckpt.universal.reading.sources import Limits, Sources
from tests.universal.reading.files import (
    Files,
    cut,
    layouts,
    matched_of,
    move,
    read_all,
    read_units,
    reader_of,
    target_of,
)
from tests.universal.rules import relayout
from tests.universal.safetensors_files import bits

F32 = np.dtype("float32")
BF16, F8 = map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn))


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def drawn(*shape, dtype=F32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def operand(number, *dims, blocks=None, viewed_as=None):
    blocks = (1,) * len(dims) if blocks is None else blocks
    return Operand(number, dims, blocks, viewed_as)


def derived_of(how, operands, like, **options):
    """A derived tensor with the shape and the dtype of another one."""
    return Derived(
        how=how, operands=operands, shape=like.shape, dtype=like.dtype, **options
    )


def with_replicas(draw, tensors, moves):
    """Some moves from tensors that are compared with replicas of themselves."""
    derived, made = [], []
    for each in moves:
        if draw(st.booleans()):
            tensor = tensors[each.source]
            same = operand(each.source, *range(len(tensor.shape)))
            replicas = (same,) * draw(st.integers(1, 3))
            number = len(tensors) + len(derived)
            derived.append(derived_of("equal", replicas, tensor))
            each = dataclasses.replace(each, source=number)
        made.append(each)
    return made, derived


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


@given(data=st.data())
def test_every_needed_box_gets_the_values_of_its_sources(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("files")
    tensors, moves, targets, expected = data.draw(layouts(directory))
    moves, derived = with_replicas(data.draw, tensors, moves)
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
        assert values.tobytes() == expected[target.name][place].tobytes()
    if gap_bytes == 0 and not derived:
        # Each needed byte is read once, and no other.
        num_bytes = sum(values.nbytes for *_, values in read)
        assert sum(span.stop - span.start for span in spans) == num_bytes


@settings(max_examples=10)
@given(data=st.data())
def test_a_target_that_lacks_a_move_or_has_one_twice_is_refused(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("files")
    tensors, made, targets, _ = data.draw(layouts(directory))
    chosen = data.draw(st.sampled_from(made))
    kept = [each for each in made if each is not chosen]
    for moves, problem in ((kept, "nothing"), ([*kept, chosen, chosen], "two sources")):
        with pytest.raises(
            errors.CheckpointError, match=f"{chosen.target}.*filled by {problem}"
        ):
            read_all(tensors, moves, targets)


def test_a_fill_is_a_value_of_its_target(files):
    files.add(np.zeros(2, np.float16))
    fill = Fill(target="w", start=(2,), stop=(3,), value=1e9)
    target = target_of(3, dtype="float16")
    with pytest.raises(
        errors.CheckpointError,
        match=r"w: 1000000000.0 cannot be represented in float16",
    ):
        read_all(files.tensors, files.moves(), [target], fills=[fill])


# What is computed.


@st.composite
def computed(draw, how):
    """A derived tensor of two dims, and the arrays that it is computed of."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = st.integers(1, 6)
    out, inner, arrays, operands = draw(counts), 2 * draw(counts), [], []

    def add(shape, dtype, *dims, low=-8, **options):
        operands.append(operand(len(arrays), *dims, **options))
        # Sums and products of these are exact.
        arrays.append(generator.integers(low, low + 17, shape).astype(dtype))

    def add_packed():
        dtype = np.dtype(draw(st.sampled_from(["float4_e2m1fn", "int4", "uint4"])))
        add((out, inner // 2), np.uint8, 0, 1, low=0, viewed_as=dtype)
        return dtype

    factor, dtype = 1.0, F32
    if how == "equal":
        dtype = add_packed()
    elif how in ("mean", "sum"):
        each = draw(st.sampled_from(["int4", "int8", "int64", F32, BF16]))
        orders = st.lists(st.permutations((0, 1)), min_size=1, max_size=6)
        for order in [(0, 1), *draw(orders)]:
            add([(out, inner)[dim] for dim in order], each, *order)
        if isinstance(each, str):
            dtype = np.dtype("int64" if how == "sum" else "float64")
    elif how == "plus":
        factor, rank = 2.0, draw(counts)
        shapes = {(0, 1): (out, inner), (0, -1): (out, rank), (-1, 1): (rank, inner)}
        for dims, shape in shapes.items():
            add(shape, BF16, *dims)
    else:
        factor, (o, i) = 2.0, draw(st.tuples(counts, counts))
        if draw(st.booleans()):
            add_packed()
        else:
            add((out, inner), draw(st.sampled_from([F8, "int8"])), 0, 1)
        add((-(-inner // i), -(-out // o)), BF16, 1, 0, blocks=(i, o))
        add((out,), np.uint8, 0, low=120, viewed_as=np.dtype(ml_dtypes.float8_e8m0fnu))
    like = target_of(out, inner, dtype=dtype)
    return derived_of(how, operands, like, factor=factor), arrays


@pytest.mark.parametrize("how", ["equal", "mean", "sum", "times", "plus"])
@given(data=st.data())
def test_derived_tensors_are_what_numpy_computes_in_any_cut(
    tmp_path_factory, how, data
):
    files = Files(tmp_path_factory.mktemp("files"))
    spec, arrays = data.draw(computed(how))
    for array in arrays:
        files.add(array)
    expected = relayout.derived(spec, arrays)
    target = target_of(*spec.shape, dtype=spec.dtype)
    needed = data.draw(units([target]))
    with mock.patch.object(sources, "PART_BYTES", data.draw(small)):
        moves = [move(target, source=len(files.tensors))]
        reader = reader_of(files.tensors, moves, [target], derived=[spec])
        read = read_units(reader, needed)
    for _, box, values in read:
        place = tuple(map(slice, box.start, box.stop))
        assert values.tobytes() == expected[place].tobytes()


def test_a_part_of_a_derived_tensor_is_computed_once_for_all_boxes(files):
    values = drawn(64, 32)
    path = files.add(values)
    target = target_of(64, 32)
    spec = derived_of("equal", [operand(0, 0, 1)] * 2, values)
    reader = reader_of(
        files.tensors, [move(target, source=1)], [target], derived=[spec]
    )
    read = mock.patch.object(
        Sources, "read_into", autospec=True, side_effect=Sources.read_into
    )
    with read as requests:
        read_units(reader, [(target, cut((64, 32), [(), (8, 16, 24)]))])
    made = [each.args[1:] for each in requests.call_args_list]
    of_file = [(start, into.nbytes) for file, start, into in made if file == path]
    assert of_file == [(0, values.nbytes)] * 2


def test_scale_and_shift_are_computed_in_float32(files):
    values = drawn(4, 5, dtype=BF16)
    files.add(values)
    read = files.read(target_of(4, 5, dtype=BF16), scale=3.7, shift=-1.25)
    expected = values.astype(F32) * np.float32(3.7) + np.float32(-1.25)
    assert read.tobytes() == expected.astype(BF16).tobytes()


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
    with pytest.raises(
        errors.CheckpointError, match=f"w: .* cannot be represented in {target}"
    ):
        files.read(target_of(2, dtype=target))


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
    with pytest.raises(errors.CheckpointError, match=r"w: .* overflows int64"):
        files.read(target, [derived_of("sum", [*both, operand(2, 0)], wide)])


def test_replicas_that_differ_in_a_bit_or_in_dtype_are_named(files):
    values = np.zeros((30, 40), np.float32)
    values[3, 3] = np.nan
    files.add(values, ranks=(("tp", 0),))
    files.add(values, ranks=(("tp", 1),))
    both = [operand(0, 0, 1), operand(1, 0, 1)]
    read = files.read(target_of(30, 40), [derived_of("equal", both, values)])
    assert read.tobytes() == values.tobytes()
    values[2, 7] = values[4, 1] = -0.0
    files.add(values, ranks=(("tp", 2),))
    files.add(values.astype(BF16), name="other")
    for number, problem in (
        (2, r"w on rank tp 0 and w on rank tp 2 differ at \[2, 7\]: 0.0 and -0.0"),
        (3, "w .* float32.* other .*bfloat16"),
    ):
        spec = derived_of("equal", [*both, operand(number, 0, 1)], values)
        with pytest.raises(errors.CheckpointError, match=problem):
            files.read(target_of(40, 30), [spec], order=(1, 0))


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
        whole, strides = boxes.whole((rows, columns)), (4 * columns, 4)
        part = stored.Fragment(box=whole, file=file, offset=0, strides=strides)
        tensor = stored.StoredTensor(
            name="w", dtype=F32, shape=(rows, columns), fragments=(part,)
        )
        reader = reader_of([tensor], [move(target)], [target])
        return [span.stop - span.start for span in reader.planned([(target, [box])])[1]]

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
    for number in range(20):
        files.add(drawn(*shape, seed=number), name=str(number))
    moves = files.moves(order=order)
    targets = [
        dataclasses.replace(each, dtype=np.dtype(dtype)) for each in files.targets()
    ]
    reader = reader_of(
        files.tensors, moves, targets, budget_bytes=budget, allocate=allocate
    )
    groups = reader.read((each, [boxes.whole(shape)]) for each in targets)
    assert {len(group) for group in groups} == {budget // 2 // targets[0].num_bytes}
    assert 0 < max(peak) <= budget
    assert peak[1] <= budget // times


# Files that cannot be read, and encoded arrays.


@pytest.mark.parametrize(
    "place", ["local", "gs", pytest.param("s3", marks=pytest.mark.slow)]
)
def test_a_file_is_read_by_ranges_and_named_with_the_tensor_where_it_ends(
    files, steps_in, place
):
    files.add(drawn(2, 2), name="encoder")
    values, url = drawn(300, 200), f"{steps_in(place)}/w.bin"
    storage.write_atomic(url, values.tobytes())
    files.add(values, name="decoder")
    encoder, decoder = files.tensors
    fragment = dataclasses.replace(*decoder.fragments, file=url)
    files.tensors = [encoder, dataclasses.replace(decoder, fragments=(fragment,))]
    target, turned = target_of(300, 200), target_of(200, 300)
    assert files.read(turned, order=(1, 0)).tobytes() == values.T.tobytes()
    assert files.read(target).tobytes() == values.tobytes()
    storage.write_atomic(url, values.tobytes()[:-400])
    where = r"w.bin: decoder is at bytes 0 to 240000, but the file ends at byte 239600"
    with pytest.raises(FormatError, match=where):
        files.read(target)
    storage.remove(url)
    with pytest.raises(errors.CheckpointError, match=r"w.bin: decoder cannot be read"):
        files.read(target)


@pytest.mark.parametrize("chunk", [(7, 5), (1, 96)], ids=str)
@pytest.mark.parametrize("is_derived", [False, True])
def test_encoded_arrays_are_read_through_tensorstore(files, chunk, is_derived):
    values = drawn(64, 96)
    spec = {"driver": "zarr3", "kvstore": f"file://{files.directory}/w/"}
    layout = ts.ChunkLayout(chunk_shape=chunk)
    like = {"dtype": ts.float32, "shape": values.shape, "chunk_layout": layout}
    ts.open(spec, create=True, **like).result().write(values).result()
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


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_of_a_flat_range_hold_its_elements_in_order(shape, data):
    bounds = st.integers(0, math.prod(shape))
    start, stop = sorted(data.draw(st.tuples(bounds, bounds)))
    elements = np.arange(math.prod(shape)).reshape(shape)
    made = boxes_of_range(shape, start, stop)
    parts = [elements[tuple(map(slice, box.start, box.stop))].flat for box in made]
    assert [*itertools.chain(*parts)] == [*range(start, stop)]
    assert len(made) <= max(1, 2 * len(shape) - 1)


@given(st.data(), st.integers(1, 60), st.sampled_from([0, 2**14]), st.integers(1, 3))
def test_damage_of_an_entry_is_seen_by_one_host_whatever_it_reads(
    tmp_path_factory, data, size, gap_bytes, num_hosts
):
    ends = st.integers(0, size)
    bounds = sorted({0, size, *data.draw(st.sets(ends, max_size=3))})
    pairs = data.draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=6))
    needed = [(min(p), max(p)) for p in pairs if p[0] != p[1]]
    files = Files(tmp_path_factory.mktemp("files"))
    content = np.arange(size, dtype=np.uint8)
    path = files.add(content)
    entries = [
        stored.Checksum(a, b, zlib.crc32(content[a:b]))
        for a, b in itertools.pairwise(bounds)
    ]
    (target,) = files.targets()
    needed_boxes = [boxes.Box(start=(a,), stop=(b,)) for a, b in needed]

    def read(host):
        with mock.patch.object(sources, "LOCAL", Limits(gap_bytes, 2**23, 0)):
            options = {"checksums": lambda _: entries, "host": (host, num_hosts)}
            reader = reader_of(files.tensors, files.moves(), [target], **options)
            found = read_units(reader, [(target, needed_boxes[:1])])
            found += read_units(reader, [(target, needed_boxes[1:])])
        reader.checks.finish()
        return [each.tolist() for *_, each in found]

    for host in range(num_hosts):
        assert read(host) == [content[a:b].tolist() for a, b in needed]
    at = data.draw(st.integers(0, size - 1))
    content[at] ^= 1
    pathlib.Path(path).write_bytes(content.tobytes())
    first = max(bound for bound in bounds[:-1] if bound <= at)
    last = min(bound for bound in bounds if bound > at)
    problems = []
    for host in range(num_hosts):
        try:
            read(host)
        except FormatError as error:
            problems.append(str(error))
    (problem,) = problems
    assert f"bytes {first} to {last}" in problem


# Trees of arrays.

MESH = jax.make_mesh((2, 2, 2), ("a", "b", "c"))


def read_tree(tensors, moves, abstract, *, fills=(), **options):
    """The tree that moves make of tensors."""
    matched = matched_of(moves, loading.targets_of(abstract), fills=fills)
    checkpoint = stored.Checkpoint(format="test", tensors=tensors)
    return loading.read_tree(checkpoint, matched, abstract, **options)


@st.composite
def shardings(draw, shape):
    axes = ["a", "b", "c", ("a", "b"), None]
    spec, taken = [], set()
    for size in shape:
        axis = draw(st.sampled_from(axes))
        names = {axis} if isinstance(axis, str) else set(axis or ())
        if names & taken or size % 2 ** len(names):
            axis = None
        taken |= names if axis else set()
        spec.append(axis)
    return NamedSharding(MESH, PartitionSpec(*spec))


@given(data=st.data())
def test_a_tree_is_bit_equal_under_any_sharding(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("files")
    tensors, moves, _, expected = data.draw(layouts(directory))
    abstract = {
        name: jax.ShapeDtypeStruct(
            values.shape, values.dtype, sharding=data.draw(shardings(values.shape))
        )
        for name, values in expected.items()
    }
    budget_bytes = data.draw(st.sampled_from([1, 100, 2**20]))
    read = read_tree(tensors, moves, abstract, budget_bytes=budget_bytes)
    assert bits(read) == bits(expected)
    for name, wanted in abstract.items():
        assert read[name].sharding == wanted.sharding


def test_padding_is_filled_and_typed_keys_numbers_and_functions_are_there(tmp_path):
    files = Files(tmp_path)
    arrays = {
        "rng": np.array([[1, 2], [3, 4]], np.uint32),
        "step": np.array(7, np.int32),
        "embedding": drawn(3, 2),
    }
    for name, array in arrays.items():
        files.add(array, name=name)
    fill = Fill(target="embedding", start=(3, 0), stop=(4, 2), value=5)
    sharding = NamedSharding(MESH, PartitionSpec("a"))
    abstract = {
        "rng": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2)),
        "step": 0,
        "embedding": jax.ShapeDtypeStruct((4, 2), F32, sharding=sharding),
        "activation": jax.nn.relu,
    }
    read = read_tree(files.tensors, files.moves(), abstract, fills=[fill])
    assert jax.random.key_data(read["rng"]).tolist() == [[1, 2], [3, 4]]
    assert read["step"] == 7
    assert type(read["step"]) is int
    assert read["activation"] is jax.nn.relu
    expected = np.concatenate([drawn(3, 2), np.full((1, 2), 5, np.float32)])
    assert np.asarray(read["embedding"]).tobytes() == expected.tobytes()


def test_no_thread_reads_on_while_an_error_of_a_leaf_is_handled(tmp_path, monkeypatch):
    files = Files(tmp_path)
    for name in "abcd":
        files.add(drawn(100, 10), name=name)
    abstract = {name: jax.ShapeDtypeStruct((100, 10), F32) for name in "abcd"}

    def fail(_, values):
        raise ValueError(f"full after {len(values)}")

    monkeypatch.setattr(trees.WantedLeaf, "make", fail)
    with pytest.raises(ValueError, match="full") as kept:
        read_tree(files.tensors, files.moves(), abstract, budget_bytes=1)
    assert kept.tb is not None
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("relayout") for name in names)
