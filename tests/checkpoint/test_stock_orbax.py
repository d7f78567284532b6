"""Stock Orbax, without this package, loads the steps of the persistent tier."""

import gc
import pathlib
import random

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from tests.checkpoint import orbax_steps, stock_environment, stock_program

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

KINDS = ("renamed", "in place")


def root_of(kind, path):
    return persistent_root.PersistentRoot(
        path=storage.absolute(path), in_place=kind == "in place"
    )


def trees():
    mesh = jax.make_mesh(
        (4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    return {"state": orbax_steps.state(mesh)}


def check(loaded, *, devices):
    expected = stock_program.digests(trees()["state"])
    assert loaded["resharded"] == expected
    assert loaded["as_saved"] == (expected if devices == 8 else None)
    assert loaded["devices"] == devices
    assert (loaded["step"], loaded["parts"]) == (5, ["data", "state"])
    assert loaded["is_orbax"]
    assert loaded["metrics"] == {"loss": 1.5}


@pytest.mark.parametrize(("kind", "shape"), [("renamed", (2, 4)), ("in place", (4, 2))])
def test_orbax_loads_the_bits_on_other_meshes(kind, shape, tmp_path):
    orbax_steps.save(root_of(kind, tmp_path), trees(), metrics={"loss": 1.5})
    check(stock_program.load(tmp_path, kind, shape), devices=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "devices", "shape"), [("in place", 8, (2, 4)), ("renamed", 1, (1, 1))]
)
def test_orbax_loads_the_bits_where_nothing_of_ours_is_installed(
    kind, devices, shape, tmp_path
):
    stock_environment.set_up()
    root = tmp_path / "steps"
    orbax_steps.save(root_of(kind, root), trees(), metrics={"loss": 1.5})
    loaded = stock_environment.load(
        root, kind, devices=devices, shape=shape, directory=tmp_path
    )
    assert not loaded["ours"]
    check(loaded, devices=devices)


def test_a_stateful_component_is_loaded_by_its_own_method(tmp_path):
    class Data:
        async def save(self, directory):
            raise NotImplementedError

        async def load(self, directory):
            async def read():
                self.content = (directory / "cursor.json").read_bytes()

            return read()

    orbax_steps.save(root_of("renamed", tmp_path), trees())
    data = Data()
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load_checkpointables(5, {"data": data})
    assert data.content == orbax_steps.CURSOR


# When one part of a load fails, Orbax drops another that it has not begun.
@pytest.mark.filterwarnings("ignore:coroutine 'Store._get_array_metadatas'")
def test_orbax_notices_a_flipped_bit_of_a_value(tmp_path):
    wanted = np.arange(4096, dtype=np.float32).reshape(64, 64)
    whole = {"state": {"w": jax.numpy.asarray(wanted)}}
    orbax_steps.save(root_of("renamed", tmp_path), whole)
    # The values of a chunk as they lie in a file of the store.
    row = wanted[:1].tobytes()
    (path,) = [
        path
        for path in pathlib.Path(tmp_path, "5", "state").rglob("d/*")
        if row in path.read_bytes()
    ]
    healthy = path.read_bytes()
    generator = random.Random(7)
    for _ in range(20):
        bit = generator.randrange(8 * len(row))
        spoilt = bytearray(healthy)
        spoilt[healthy.index(row) + bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        with pytest.raises(Exception, match="error while reading array") as raised:
            ocp.load(tmp_path / "5")
        assert "Digest mismatch" in str(raised.value.__cause__)
    path.write_bytes(healthy)
    assert np.array_equal(ocp.load(tmp_path / "5")["w"], wanted)
    # Finalizers of the dropped futures must not warn in another test.
    del raised
    gc.collect()


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_finds_only_committed_steps_and_cleans_the_others_away(kind, tmp_path):
    root = root_of(kind, tmp_path)
    orbax_steps.save(root, trees(), step=5)
    orbax_steps.save(root, trees(), step=6)
    root.uncommit(6)
    context = ocp.Context()
    mode = ocp.options.AtomicityMode
    context.atomicity.mode = (
        mode.COMMIT_FILE if kind == "in place" else mode.ATOMIC_RENAME
    )
    tier = persistent_tier.PersistentTier(root, run=orbax_steps.RUN)
    assert len(root.leftovers()) == 1
    with (
        context,
        ocp.training.Checkpointer(tmp_path, cleanup_tmp_directories=True) as stock,
    ):
        assert [each.step for each in stock.checkpoints] == tier.steps() == [5]
        # It cleans in the background, and before it saves again.
        stock.save_checkpointables(7, trees())
        assert not root.leftovers()


def test_orbax_goes_on_in_our_directory_and_its_steps_are_foreign(tmp_path):
    root = root_of("renamed", tmp_path)
    orbax_steps.save(root, trees(), step=5)
    with ocp.training.Checkpointer(tmp_path) as stock:
        stock.save_checkpointables(6, trees())
        assert [each.step for each in stock.checkpoints] == [5, 6]
    tier = persistent_tier.PersistentTier(root, run=orbax_steps.RUN)
    assert tier.steps() == [5]
    assert tier.foreign_steps() == [6]
    assert [each.step for each in tier.held()] == [5]
