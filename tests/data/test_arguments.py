"""Invalid arguments are one error, in the words of the function that was called."""

import functools
import pathlib
import re

import grain
import jax
import numpy as np
import pytest

from elastic_ckpt import data as ec_data
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import iterator, mixing, sharded_data, tokens
from tests import corpora, pipelines


def refused(match, error=errors.ConfigError):
    return pytest.raises(error, match=match)


SOURCES = [ec_data.ArrayRecord, ec_data.Parquet, ec_data.TFRecord]
POSITIONAL = functools.partial(ec_data.positional, max_target_length=8)


@pytest.mark.parametrize("make", [*SOURCES, POSITIONAL])
def test_files_may_be_a_list_or_paths(make):
    wanted = make(files=("a", "b"))
    assert make(files=["a", "b"]) == wanted
    assert make(files=(pathlib.Path("a"), "b")) == wanted
    assert hash(make(files=["a", "b"])) == hash(wanted)


@pytest.mark.parametrize("make", [*SOURCES, POSITIONAL])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("a.parquet", "files='a.parquet' is a single name; give a tuple"),
        ((), "files is empty; give at least one"),
        ([], "files is empty; give at least one"),
        (None, "files=None: 'NoneType' object is not iterable; give names"),
        ((1, 2), "files=(1, 2): expected str, bytes or os.PathLike object, not int"),
    ],
)
def test_files_that_are_no_names_are_refused(make, files, message):
    with refused(rf"^\w+: {re.escape(message)}"):
        make(files=files)


@pytest.mark.parametrize("make", [*SOURCES, POSITIONAL])
def test_a_file_is_named_once(make):
    with refused(r"^\w+: files has 'b' twice; name it once"):
        make(files=("a", "b", "c", "b"))


@pytest.mark.parametrize("make", SOURCES)
def test_a_single_text_is_not_a_list_of_columns(make):
    with refused(rf"^{make.__name__}: columns='text' is a single name"):
        make(files=("a",), columns="text")


@pytest.mark.parametrize("make", [ec_data.ArrayRecord, ec_data.TFRecord])
def test_a_record_format_that_there_is_none_of_is_refused(make):
    with refused(f"{make.__name__}: record_format='json'; choose one of bytes, tf_"):
        make(files=("a",), record_format="json")


@pytest.mark.parametrize(("shard", "num_shards"), [(-1, 4), (4, 4), (0, 0)])
def test_a_shard_is_one_of_the_shards(shard, num_shards):
    sharded = corpora.Numbers(blocks=((4,),))
    with refused(f"Records: shard={shard} of num_shards={num_shards}; shards are"):
        ec_data.Records(sharded, shard=shard, num_shards=num_shards)


def endless(shard):
    return grain.MapDataset.range(shard, 100).to_iter_dataset()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ec_data.ReadOptions(num_epochs=0),
            "ReadOptions: num_epochs=0; give 1 or",
        ),
        (
            lambda: ec_data.WindowShuffle(endless(0), window_size=0, seed=1),
            "WindowShuffle: window_size=0; give 1 or more",
        ),
        (
            lambda: ec_data.lm.ConcatThenSplit(endless(0), features="tokens", length=8),
            "ConcatThenSplit: features='tokens', length=8; give a tuple of names",
        ),
        (
            lambda: ec_data.lm.ConcatThenSplit(endless(0), features=("x",), length=0),
            "length=0; give a tuple of names, and a length of 1 or",
        ),
        (
            lambda: mixing.Mixture({"a": endless(0)}, {"b": 1}, shard=0),
            r"Mixture: parts are named \['a'\], and weights \['b'\]; give each",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make, message):
    with refused(message):
        make()


def numbers(shard):
    examples = grain.MapDataset.range(shard, 10**6).map(lambda n: {"x": np.array(n)})
    return examples.to_iter_dataset(pipelines.IN_CALLER)


def sharded(make_shard, num_shards=2):
    return sharded_data.sharded(make_shard, num_shards=num_shards, pipeline="mine")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1, "num_ranks": 2}, "rank=-1 of num_ranks=2; ranks are numbered"),
        ({"rank": 2, "num_ranks": 2}, "rank=2 of num_ranks=2; ranks are numbered"),
        ({"num_ranks": 0}, "rank=0 of num_ranks=0; ranks are numbered from 0 to"),
        (
            {"global_batch_size": 0},
            "global_batch_size=0 cannot be divided evenly",
        ),
        ({"global_batch_size": -4}, "global_batch_size=-4 cannot be divided evenly"),
        (
            {"num_ranks": 3, "global_batch_size": 4},
            "global_batch_size=4 cannot be divided evenly among num_ranks=3; choose",
        ),
    ],
)
def test_ranks_and_rows_that_cannot_be_meant_are_refused(settings, message):
    with refused(f"^LocalBatches: {message}"):
        ec_data.LocalBatches(sharded(numbers), **{"global_batch_size": 4, **settings})


@pytest.mark.parametrize("size", [0, -8, 3, 12])
def test_a_batch_that_does_not_divide_over_the_devices_is_refused(size):
    mesh = topology.mesh_of(topology.present(2))
    with refused(
        f"global_batch_size={size} cannot be divided evenly among the 8 parts that the"
        r" mesh makes of it \(slice=2, fsdp=4\); choose a positive multiple of 8"
    ):
        ec_data.Batches(sharded(numbers), mesh=mesh, global_batch_size=size)


def test_a_batch_of_another_size_that_does_not_divide_leaves_the_iterator(mesh_batches):
    with refused("global_batch_size=12 cannot be divided evenly among the 8 parts"):
        mesh_batches.resize(12)
    assert next(mesh_batches)["x"].shape == (8,)


@pytest.fixture
def mesh_batches():
    mesh = topology.mesh_of(topology.present(2))
    made = ec_data.Batches(sharded(numbers), mesh=mesh, global_batch_size=8)
    yield made
    made.close()


def batch(make_shard):
    return next(ec_data.LocalBatches(sharded(make_shard), global_batch_size=4))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            lambda n: {"x": np.zeros(2 + n % 2)},
            r"feature 'x' of several shapes, \(2,\), \(3,\) .*; pad or pack them",
        ),
        (
            lambda n: {"x": np.zeros(2), **({"y": np.zeros(3)} if n % 2 else {})},
            r"feature 'y' of several shapes, \(3,\), None \(None: without it\)",
        ),
        (lambda n: np.array(n), "make_shard yields a ndarray as a row; yield dicts of"),
        (lambda n: (n, n), "make_shard yields a tuple as a row; yield dicts of arrays"),
    ],
)
def test_rows_that_make_no_batch_are_named(row, message):
    def make_shard(shard):
        numbers = grain.MapDataset.range(shard % 2, 9 + shard)
        return numbers.map(row).to_iter_dataset(pipelines.IN_CALLER)

    with refused(message, errors.DataError):
        batch(make_shard)


@pytest.mark.parametrize("value", ["text", b"bytes\0", ["a", "b"], None])
def test_a_feature_that_is_no_numbers_is_named(value):
    def make_shard(shard):
        rows = grain.MapDataset.range(shard, 100).map(lambda _: {"caption": value})
        return rows.to_iter_dataset(pipelines.IN_CALLER)

    batches = iterator.Batches(
        sharded(make_shard),
        mesh=topology.mesh_of(topology.present(2)),
        global_batch_size=8,
    )
    with refused(
        "feature 'caption' has values such as .*, and JAX arrays hold numbers alone;",
        errors.DataError,
    ):
        next(batches)


@pytest.mark.parametrize("value", [2**40, -(2**31) - 1])
def test_a_number_that_jax_would_cut_is_an_error(value):
    def make_shard(shard):
        numbers = grain.MapDataset.range(100)
        rows = numbers.map(lambda n: {"x": np.array(value if n > 4 else n + shard)})
        return rows.to_iter_dataset(pipelines.IN_CALLER)

    batches = iterator.Batches(
        sharded(make_shard),
        mesh=topology.mesh_of(topology.present(2)),
        global_batch_size=8,
    )
    first = next(batches)["x"]
    assert first.dtype == np.int32
    assert sorted(np.asarray(first).tolist()) == [0, 1, 1, 2, 2, 3, 3, 4]
    with refused(
        f"feature 'x' has the value {value}, but JAX would convert it to int32",
        errors.DataError,
    ):
        next(batches)
    batches.close()
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_a_token_that_int32_cannot_hold_is_an_error(dtype):
    kept = np.array([0, 2**31 - 1], dtype)
    np.testing.assert_array_equal(
        tokens.narrowed(kept, place="a"), kept.astype(np.int32), strict=True
    )
    wide = 2**40 if dtype != np.uint32 else 2**31
    with refused(
        f"a has the token {wide}, which does not fit into 32", errors.DataError
    ):
        tokens.narrowed(np.array([1, wide], dtype), place="a")
