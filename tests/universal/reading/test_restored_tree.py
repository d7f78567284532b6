"""Trees that are read through plans, compared with NumPy bit for bit."""

import dataclasses
import functools
import os
import threading
import time

import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import boxes, errors
from elastic_ckpt.universal import moves
from elastic_ckpt.universal.formats import checkpoint as stored
from elastic_ckpt.universal.formats import format_error
from elastic_ckpt.universal.plan import spans
from elastic_ckpt.universal.reading import (
    byte_source,
    planned_reads,
    restored_tree,
)
from elastic_ckpt.universal.strides import row_major
from tests.universal import random_layouts

MESH = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
F32 = np.dtype("float32")
BF16 = np.dtype(ml_dtypes.bfloat16)


def checkpoint_of(tensors):
    return stored.Checkpoint(format="test", tensors=tensors)


def read_tree(checkpoint, moves, fills, abstract, *, is_staged=False, **options):
    """The tree that moves make of a checkpoint."""
    leaves = [
        dataclasses.replace(each, is_staged=is_staged)
        for each in restored_tree.target_leaves(abstract)
    ]
    made = restored_tree.read_leaves(checkpoint, moves, fills, leaves, **options)
    return trees.rebuilt(abstract, "", made)


def as_tree(by_path):
    tree = {}
    for path, leaf in by_path.items():
        *outer, last = path.split("/")
        branch = tree
        for key in outer:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return tree


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


def written(layout, directory):
    """The tensors of a layout, in files of a directory."""
    for name, content in layout.files.items():
        (directory / name).write_bytes(content)
    return [
        stored.StoredTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            fragments=tuple(
                stored.Fragment(
                    box=fragment.box,
                    file=str(directory / fragment.file),
                    offset=fragment.offset,
                    strides=fragment.strides,
                )
                for fragment in tensor.fragments
            ),
        )
        for tensor in layout.tensors
    ]


@given(data=st.data(), layout=random_layouts.layouts(("float32", "uint16", "int8")))
def test_a_tree_is_bit_equal_under_any_sharding(tmp_path_factory, data, layout):
    tensors = written(layout, tmp_path_factory.mktemp("files"))
    abstract = as_tree(
        {
            name: jax.ShapeDtypeStruct(
                values.shape,
                values.dtype,
                sharding=data.draw(shardings(values.shape)),
            )
            for name, values in layout.targets.items()
        }
    )
    tree = read_tree(
        checkpoint_of(tensors),
        layout.moves,
        [],
        abstract,
        is_staged=data.draw(st.booleans()),
        budget_bytes=data.draw(st.sampled_from([1, 100, 2**20])),
    )
    restored = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    assert restored.keys() == layout.targets.keys()
    for name, values in layout.targets.items():
        assert np.asarray(restored[name]).tobytes() == values.tobytes()
    for leaf, wanted in zip(
        jax.tree.leaves(tree), jax.tree.leaves(abstract), strict=True
    ):
        assert leaf.sharding == wanted.sharding
        assert leaf.dtype == wanted.dtype


class Files:
    """Arrays in one file each, as stored tensors with ranks."""

    def __init__(self, directory):
        self.directory = directory
        self.tensors = []

    def add(self, values, *, name="w", ranks=()):
        file = self.directory / f"{len(self.tensors)}.bin"
        file.write_bytes(values.tobytes())
        self.tensors.append(
            stored.StoredTensor(
                name=name,
                ranks=ranks,
                dtype=values.dtype,
                shape=values.shape,
                fragments=(
                    stored.Fragment(
                        box=boxes.whole(values.shape),
                        file=str(file),
                        offset=0,
                        strides=row_major(values.shape, values.itemsize),
                    ),
                ),
            )
        )
        return str(file)

    def moves(self, arithmetic=None, *, target="w", order=None):
        rank = len(self.tensors[0].shape)
        order = tuple(range(rank)) if order is None else order
        side = moves.Side(start=(0,) * rank, dims=tuple(range(rank)), steps=(1,) * rank)
        sources = [
            moves.Source(tensor=number, side=side)
            for number in range(len(self.tensors))
        ]
        plain = arithmetic is None or arithmetic.reduction is moves.Reduction.NONE
        return [
            moves.Move(
                target=target,
                sizes=self.tensors[0].shape,
                sources=tuple(group),
                target_side=moves.Side(
                    start=(0,) * rank, dims=order, steps=(1,) * rank
                ),
                arithmetic=arithmetic,
            )
            for group in ([[each] for each in sources] if plain else [sources])
        ]

    def read(self, shape, dtype, arithmetic=None, *, order=None, **options):
        abstract = {"w": jax.ShapeDtypeStruct(shape, dtype)}
        tree = read_tree(
            checkpoint_of(self.tensors),
            self.moves(arithmetic, order=order),
            [],
            abstract,
            **options,
        )
        return np.asarray(tree["w"])


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def drawn(*shape, dtype=F32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "order"),
    [(F32, (1, 0, 2)), (BF16, (2, 1, 0)), (np.dtype("int8"), (1, 2, 0))],
)
def test_large_arrays_are_transposed_bit_for_bit(files, dtype, order):
    bits = np.random.default_rng(0).integers(0, 256, 130 * 70 * 190 * dtype.itemsize)
    values = bits.astype(np.uint8).view(dtype).reshape(130, 70, 190)
    files.add(values)
    moved = np.moveaxis(values, (0, 1, 2), order)
    restored = files.read(moved.shape, dtype, order=order)
    assert restored.tobytes() == moved.tobytes()


def test_scale_and_shift_are_computed_in_float32(files):
    values = drawn(4, 5, dtype=BF16)
    files.add(values)
    restored = files.read((4, 5), BF16, moves.Arithmetic(scale=3.7, shift=-1.25))
    expected = values.astype(F32) * np.float32(3.7) + np.float32(-1.25)
    assert restored.tobytes() == expected.astype(BF16).tobytes()


def test_means_are_added_up_in_the_order_of_the_ranks(files):
    ranks = 5
    every = [drawn(900, 400, dtype=BF16, seed=rank) for rank in range(ranks)]
    for rank, values in enumerate(every):
        files.add(values, ranks=(("dp", rank),))
    mean = moves.Arithmetic(reduction=moves.Reduction.MEAN)
    restored = files.read((400, 900), F32, mean, order=(1, 0))
    total = every[0].astype(F32)
    for values in every[1:]:
        total += values.astype(F32)
    assert restored.tobytes() == (total / ranks).T.tobytes()


EQUAL = moves.Arithmetic(reduction=moves.Reduction.EQUAL)


def test_replicas_that_are_bit_equal_are_read(files):
    values = drawn(700, 500)
    values[3, 3] = np.nan
    for rank in range(3):
        files.add(values, ranks=(("tp", rank),))
    assert files.read((700, 500), F32, EQUAL).tobytes() == values.tobytes()


def test_replicas_that_differ_in_a_bit_are_named_with_the_first_index(files):
    values = np.zeros((30, 40), np.float32)
    files.add(values, ranks=(("tp", 0),))
    files.add(values, ranks=(("tp", 1),))
    values[2, 7] = values[4, 1] = -0.0
    files.add(values, ranks=(("tp", 2),))
    with pytest.raises(
        errors.CheckpointError,
        match=r"w of rank tp 0 and w of rank tp 2 differ at \[2, 7\]: 0.0 and -0.0",
    ):
        files.read((40, 30), F32, EQUAL, order=(1, 0))


def test_a_file_that_is_cut_short_is_named_with_the_tensor_and_the_place(files):
    files.add(drawn(100, 10), name="encoder")
    file = files.add(drawn(100, 10), name="decoder")
    os.truncate(file, 3000)
    moves_of_both = [*files.moves(target="a"), *files.moves(target="b")]
    abstract = {name: jax.ShapeDtypeStruct((100, 10), F32) for name in "ab"}
    with pytest.raises(
        format_error.FormatError,
        match=r"1.bin: decoder is at bytes 0 to 4000, but the file ends after 3000",
    ):
        read_tree(
            checkpoint_of(files.tensors),
            [moves_of_both[0], moves_of_both[3]],
            [],
            abstract,
        )


def staged(leaves, make):
    """The leaves as on devices with their own memory; `make` has name and values."""
    return [
        dataclasses.replace(
            each,
            leaf=dataclasses.replace(
                each.leaf,
                place=lambda _, values: values,
                join=functools.partial(make, each.tensor.name),
            ),
            is_staged=True,
        )
        for each in leaves
    ]


def test_no_thread_reads_on_while_an_error_of_a_leaf_is_handled(files, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    moved = []
    for number, name in enumerate("abcd"):
        files.add(drawn(100, 10), name=name)
        moved.append(files.moves(target=name)[number])
    abstract = {name: jax.ShapeDtypeStruct((100, 10), F32) for name in "abcd"}

    def fail(_, values):
        raise ValueError(f"full after {len(values)}")

    leaves = staged(restored_tree.target_leaves(abstract), fail)
    with pytest.raises(ValueError, match="full") as kept:
        restored_tree.read_leaves(
            checkpoint_of(files.tensors), moved, [], leaves, budget_bytes=1
        )
    assert kept.tb is not None
    assert "relayout" not in [thread.name for thread in threading.enumerate()]


def test_padding_is_filled_and_typed_keys_and_numbers_are_made(files):
    files.add(np.array([[1, 2], [3, 4]], np.uint32))
    files.add(np.array(7, np.int32))
    files.add(drawn(3, 2))
    every = files.moves(target="rng")[:1]
    for name, number in (("step", 1), ("embedding", 2)):
        tensor = files.tensors[number]
        rank = len(tensor.shape)
        side = moves.Side(start=(0,) * rank, dims=tuple(range(rank)), steps=(1,) * rank)
        every.append(
            moves.Move(
                target=name,
                sizes=tensor.shape,
                sources=(moves.Source(tensor=number, side=side),),
                target_side=side,
            )
        )
    fill = moves.Fill(target="embedding", start=(3, 0), stop=(4, 2), value=5)
    sharding = NamedSharding(MESH, PartitionSpec("a"))
    abstract = {
        "rng": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2)),
        "step": 0,
        "embedding": jax.ShapeDtypeStruct((4, 2), F32, sharding=sharding),
    }
    tree = read_tree(checkpoint_of(files.tensors), every, [fill], abstract)
    assert jax.random.key_data(tree["rng"]).tolist() == [[1, 2], [3, 4]]
    assert tree["step"] == 7
    assert type(tree["step"]) is int
    expected = np.concatenate([drawn(3, 2), np.full((1, 2), 5, np.float32)])
    assert np.asarray(tree["embedding"]).tobytes() == expected.tobytes()


class Counting(byte_source.LocalFiles):
    """Counts the bytes that are read, and those of requests at the same time."""

    lock = threading.Lock()
    # So that other threads read at the same time, if they may.
    pause_secs = 0.0

    def __init__(self):
        super().__init__()
        Counting.current = Counting.peak = 0
        Counting.ranges = []

    def read_into(self, file, start, parts):
        size = sum(part.nbytes for part in parts)
        with self.lock:
            Counting.ranges.append((file, start, start + size))
            Counting.current += size
            Counting.peak = max(Counting.peak, Counting.current)
        time.sleep(self.pause_secs)
        try:
            return super().read_into(file, start, parts)
        finally:
            with self.lock:
                Counting.current -= size


def test_the_bytes_in_flight_keep_to_the_budget(files, monkeypatch):
    budget = 2**20
    monkeypatch.setattr(planned_reads, "LocalFiles", Counting)
    monkeypatch.setattr(Counting, "pause_secs", 0.003)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    small = spans.Limits(gap_bytes=0, span_bytes=2**18)
    monkeypatch.setattr(planned_reads.load_plan, "limits_of", lambda _: small)
    values = drawn(4096, 1024)
    files.add(values)
    restored = files.read((1024, 4096), F32, order=(1, 0), budget_bytes=budget)
    assert restored.tobytes() == values.T.tobytes()
    assert Counting.peak <= budget


def test_every_byte_is_read_once_however_many_devices_hold_it(files, monkeypatch):
    monkeypatch.setattr(planned_reads, "LocalFiles", Counting)
    values = drawn(256, 512)
    files.add(values)
    sharding = NamedSharding(MESH, PartitionSpec(None, "b"))
    abstract = {"w": jax.ShapeDtypeStruct((512, 256), F32, sharding=sharding)}
    tree = read_tree(
        checkpoint_of(files.tensors), files.moves(order=(1, 0)), [], abstract
    )
    assert np.asarray(tree["w"]).tobytes() == values.T.tobytes()
    read = sorted((start, stop) for _, start, stop in Counting.ranges)
    assert [start for start, _ in read] == [0, *(stop for _, stop in read[:-1])]
    assert read[-1][1] == values.nbytes


@pytest.mark.parametrize("chunk", [(7, 5), (1, 96)], ids=str)
def test_encoded_arrays_are_read_through_tensorstore(tmp_path, chunk):
    values = drawn(64, 96)
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{tmp_path}/w/",
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
    files = Files(tmp_path)
    files.tensors.append(
        stored.StoredTensor(name="w", dtype=F32, shape=(64, 96), spec=spec)
    )
    sharding = NamedSharding(MESH, PartitionSpec("a", ("b", "c")))
    abstract = {"w": jax.ShapeDtypeStruct((96, 64), F32, sharding=sharding)}
    tree = read_tree(
        checkpoint_of(files.tensors), files.moves(order=(1, 0)), [], abstract
    )
    assert np.asarray(tree["w"]).tobytes() == values.T.tobytes()


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
    assert files.read((200, 300), F32, order=(1, 0)).tobytes() == values.T.tobytes()
    assert files.read((300, 200), F32).tobytes() == values.tobytes()
    system.pipe_file(path, values.tobytes()[:-400])
    with pytest.raises(
        format_error.FormatError, match=r"w.bin: w .* ends after 239600"
    ):
        files.read((300, 200), F32)
    system.rm_file(path)
    with pytest.raises(errors.CheckpointError, match=r"w.bin: w cannot be read"):
        files.read((300, 200), F32)
