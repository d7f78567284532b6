"""Checkpoints of every format that this program ever had load on another host count.

tests/golden/formats/README.md lists them; two hosts saved each, and here is one.
"""

import functools
import json
import pathlib
import tarfile

import grain
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt import frontend
from elastic_ckpt.core import checked_json, errors

FORMATS = pathlib.Path(__file__).parents[1] / "golden" / "formats"
EVERY = sorted(path.name.partition(".")[0] for path in FORMATS.glob("*.tar.xz"))
# The oldest saved through Orbax alone, and had no RAM tier.
IN_RAM = [
    name for name in EVERY if not name.startswith("orbax") and name != "storage_alone"
]
NEWEST = "before_components"
BATCHES_A_STEP = 2


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """Unpacks a fixture into the working directory."""
    monkeypatch.chdir(tmp_path)

    def unpack(name):
        with tarfile.open(FORMATS / f"{name}.tar.xz") as tar:
            tar.extractall(tmp_path, filter="data")
        return tmp_path

    return unpack


def make_shard(shard):
    numbers = grain.MapDataset.range(shard, 400, 6).seed(shard).shuffle()
    numbers = numbers.map(lambda n: {"number": np.array([n])})
    unbuffered = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return numbers.repeat().to_iter_dataset(unbuffered)


def batches(name):
    """The data of the fixtures, on the devices of this process."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    datasets = {
        "data": ec.data.positional(
            files=("texts.array_record",),
            max_target_length=8,
            shuffle_seed=7,
            num_threads=0,
        ),
        "shards": ec.data.sharded(
            make_shard, num_shards=6, pipeline="numbers, version 1"
        ),
    }
    if name == "orbax_positional":
        del datasets["shards"]
    return {
        key: ec.batches(data, mesh=mesh, global_batch_size=4)
        for key, data in datasets.items()
    }


def state(step):
    """The state that the fixtures hold after `step` steps."""
    return {
        "params": {
            "w": np.random.default_rng(step).standard_normal((8, 4), np.float32),
            "b": np.arange(5).astype(ml_dtypes.bfloat16) + ml_dtypes.bfloat16(step),
        },
        "step": np.int32(step),
    }


def abstract():
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    specs = {(8, 4): PartitionSpec("b", "a")}
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, specs.get(leaf.shape, PartitionSpec())),
        ),
        state(0),
    )


def check(name, step, checkpointer):
    """Fails unless the newest step is `step`, bit-equal, with the batches after it."""
    restored = batches(name)
    with checkpointer:
        loaded = checkpointer.load_checkpointables(
            None, {"state": abstract(), **restored}
        )
        assert checkpointer.latest.step == step
    bits = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), loaded["state"])
    assert bits == jax.tree.map(lambda leaf: leaf.tobytes(), state(step))
    expected = batches_of_one_host()
    for key, each in restored.items():
        for number in (BATCHES_A_STEP * step, BATCHES_A_STEP * step + 1):
            batch = next(each)
            assert batch.keys() == expected[key][number].keys()
            for feature, values in expected[key][number].items():
                assert np.array_equal(batch[feature], values), (key, feature)
        each.close()


@functools.cache
def batches_of_one_host():
    """The first batches of a run that was never interrupted."""
    first = {}
    for key, each in batches(NEWEST).items():
        first[key] = [jax.device_get(next(each)) for _ in range(2 * BATCHES_A_STEP + 2)]
        each.close()
    return first


def test_a_fixture_of_each_format_is_listed():
    page = (FORMATS / "README.md").read_text()
    assert len(EVERY) >= 12
    assert [name for name in EVERY if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", EVERY)
def test_storage_of_each_format_loads_on_one_host(unpacked, name):
    directory = unpacked(name)
    storage = ec.Persistent(directory / "steps", every=1)
    check(name, 1 if name == "due" else 2, frontend.Checkpointer([storage]))


@pytest.mark.parametrize("name", IN_RAM)
def test_ram_of_each_format_loads_on_one_host(unpacked, name):
    local = ec.Local(unpacked(name) / "ram")
    check(name, 2, frontend.Checkpointer([local], run="old"))


def raised(path, version):
    """Writes the file of a format as a later version of this program might."""
    fields = json.loads(path.read_bytes())
    del fields["digest"], fields["version"]
    path.chmod(0o600)
    path.write_bytes(checked_json.to_bytes(fields, version=version))


@pytest.mark.parametrize(
    ("name", "files", "newest"),
    [
        ("orbax_sharded", "data/data_state.json", 1),
        ("orbax_sharded", "shards/shards-00000-00000.json", 2),
        (NEWEST, "manifest-*.json", 1),
        (NEWEST, "worlds/2.json", 1),
    ],
)
def test_a_later_version_is_one_clear_error(unpacked, name, files, newest):
    for path in unpacked(name).rglob(files):
        raised(path, newest + 1)
    with pytest.raises(errors.ElasticCkptError) as error:
        check(name, 2, frontend.Checkpointer([ec.Persistent("steps", every=1)]))
    message = str(error.value)
    expected = f"has version {newest + 1}, and this program reads version {newest}"
    assert expected in message
    assert "continue the run with the program that wrote it" in message
