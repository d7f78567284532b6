"""Strict and lenient loading of the components of a step, with a summary."""

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.checkpoint.components import loading
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import errors
from tests.checkpoint.components.test_encoding import leaves, same


@pytest.fixture(params=["ours", "orbax"], scope="module")
def checkpointer(request, tmp_path_factory):
    """A checkpointer with step 4, which has weights and two components."""
    directory = tmp_path_factory.mktemp("steps")
    checkpointables = {
        "state": {"w": jnp.arange(3.0)},
        "schedule": Component(leaves(), "global"),
        "cache": Component([1, 2], "per_host"),
    }
    opened = ocp.training.Checkpointer(directory)
    if request.param == "ours":
        opened = ec.Checkpointer([ec.Persistent(directory, every=1)])
    with opened:
        opened.save_checkpointables(4, checkpointables)
        yield opened


def test_all_components_are_loaded_with_the_trees_that_are_asked_for(checkpointer):
    schedule, cache = Component(None, "global"), Component(None, "per_host")
    wanted = {"cache": cache, "schedule": schedule, "state": {"w": jnp.zeros(3)}}
    summary = loading.load(checkpointer, wanted)
    same(schedule.state, leaves())
    assert cache.state == [1, 2]
    assert list(summary.loaded) == list(wanted)
    assert summary.loaded["schedule"] is schedule
    assert summary.loaded["state"]["w"].tolist() == [0, 1, 2]
    assert (summary.step, summary.skipped, summary.failed) == (4, {}, {})


def test_one_error_has_all_names_and_strict_false_loads_the_rest(checkpointer):
    wanted = {
        "missing": Component(0, "global"),
        "maybe": Component(0, "global", required=False),
        "cache": Component(0, "per_host"),
    }
    said = r"step 4: .*'missing' cannot.*'schedule' was not requested.*strict=False"
    with pytest.raises(errors.CheckpointError, match=said) as caught:
        loading.load(checkpointer, wanted, 4)
    assert "maybe" not in str(caught.value)
    assert wanted["cache"].state == 0
    summary = loading.load(checkpointer, wanted, strict=False)
    assert list(summary.loaded) == ["cache"]
    assert sorted(summary.skipped) == ["maybe", "schedule"]
    lines = str(summary).splitlines()
    assert lines[0] == "step 4: loaded cache"
    assert lines[-1].startswith(
        "failed missing: step 4 has no checkpointable with this name; "
    )


def test_a_component_that_fails_leaves_the_others_as_they_were(checkpointer):
    schedule = Component("as before", "global")
    broken = Component(0, lambda: "per_nobody")
    # The one that can be read comes first.
    wanted = [("schedule", schedule), ("cache", broken)]
    said = r"'cache' cannot be loaded: .*per_nobody"
    with pytest.raises(errors.CheckpointError, match=said):
        loading.load(checkpointer, wanted)
    assert schedule.state == "as before"
    summary = loading.load(checkpointer, wanted, strict=False)
    same(schedule.state, leaves())
    assert list(summary.failed) == ["cache"]
    broken.required = False
    assert list(loading.load(checkpointer, wanted).failed) == ["cache"]
    # A name to ignore need not be asked for.
    assert loading.load(checkpointer, wanted[:1], ignore=["cache"]).loaded
    with pytest.raises(errors.ConfigError, match=r"\['cache', 'schedule'\] are used"):
        loading.load(checkpointer, [*wanted, *wanted, ("state", {})])
