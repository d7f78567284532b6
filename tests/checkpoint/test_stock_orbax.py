"""Stock Orbax, without this package, loads the steps of the persistent tier."""

import jax
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from tests.checkpoint import orbax_steps, stock_environment, stock_program
from tests.tiers.tiered_steps import steps_of

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


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_finds_only_committed_steps_and_cleans_the_others_away(kind, tmp_path):
    root = root_of(kind, tmp_path)
    orbax_steps.save(root, trees(), step=5)
    orbax_steps.save(root, trees(), step=6)
    root.uncommit(root.final(6))
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
        assert [each.step for each in stock.checkpoints] == steps_of(tier) == [5]
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
    assert steps_of(tier) == [5]
    assert list(tier.foreign_saves()) == [6]
    assert [each.step for each in tier.held(Line(save="", parents=()))] == [5]
