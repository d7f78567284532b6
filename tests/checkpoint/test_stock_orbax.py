"""Stock Orbax, without this package, loads the steps of the persistent tier."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from tests.checkpoint import stock_program
from tests.checkpoint.test_component_io import Counter
from tests.sidecar import simulated_hosts
from tests.tiers.tiered_steps import steps_of

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-stock-orbax"


def set_up_environment():
    """An environment with JAX and Orbax alone."""
    uv = os.environ.get("UV") or shutil.which("uv")
    packages = ["-c", ROOT / "constraints.txt", "jax", "orbax-checkpoint"]
    for command in (
        [uv, "venv", "-q", "--allow-existing", "-p", sys.executable, ENVIRONMENT],
        [uv, "pip", "install", "-q", "-p", ENVIRONMENT / "bin" / "python", *packages],
    ):
        subprocess.run(command, cwd=ROOT, check=True)


def save(path, *steps):
    """Two hosts save steps; returns the state."""
    with (
        simulated_hosts.Machines() as machines,
        simulated_hosts.world(
            machines, 2, slices=2, storage_alone=True, persistent=path
        ) as (ours, mesh, _),
    ):
        state = stock_program.state(mesh)
        for step in steps:
            checkpointables = {"state": state, "data": Counter()}
            assert ours.save_checkpointables(
                step, checkpointables, metrics={"loss": 1.5}
            )
    return state


def check(loaded, state, *, devices):
    expected = stock_program.digests(state)
    assert loaded["resharded"] == expected
    assert loaded["as_saved"] == (expected if devices == 8 else None)
    assert loaded["devices"] == devices
    assert (loaded["step"], loaded["parts"]) == (5, ["data", "state"])
    assert loaded["is_orbax"]
    assert loaded["metrics"] == {"loss": 1.5}


def test_orbax_loads_the_bits_on_other_meshes(kind, tmp_path):
    state = save(tmp_path, 5)
    check(stock_program.load(tmp_path, kind, (4, 2)), state, devices=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"), [("in place", (2, 4)), ("renamed", (1, 1))], indirect=["kind"]
)
def test_orbax_loads_the_bits_where_nothing_of_ours_is_installed(kind, shape, tmp_path):
    set_up_environment()
    state = save(tmp_path / "steps", 5)
    program = [ENVIRONMENT / "bin" / "python", "-I", stock_program.__file__]
    command = [*program, tmp_path / "steps", kind, *map(str, shape)]
    loaded = json.loads(subprocess.check_output(command, cwd=tmp_path))
    assert not loaded["ours"]
    check(loaded, state, devices=shape[0] * shape[1])


def test_orbax_finds_only_committed_steps_and_goes_on_beside_them(kind, tmp_path):
    save(tmp_path, 5, 6)
    root = persistent_root.PersistentRoot.from_path(tmp_path)
    root.uncommit(root.final(6))
    assert len(root.leftovers()) == 1
    tier = persistent_tier.PersistentTier(root, run="run")
    context = stock_program.context(kind)
    with (
        context,
        ocp.training.Checkpointer(tmp_path, cleanup_tmp_directories=True) as stock,
    ):
        assert [each.step for each in stock.checkpoints] == steps_of(tier) == [5]
        # It cleans in the background, and before it saves again.
        stock.save_checkpointables(7, {"state": {"n": 7}})
        assert not root.leftovers()
        assert [each.step for each in stock.checkpoints] == [5, 7]
    tier = persistent_tier.PersistentTier(root, run="run")
    assert steps_of(tier) == [5]
    assert list(tier.foreign_saves()) == [7]
    assert [each.step for each in tier.held(Line(save="", parents=()))] == [5]
