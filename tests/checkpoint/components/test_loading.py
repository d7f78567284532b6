"""Strict and lenient loading of the components of a step, with a summary."""

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.components import loading
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Persistent


@pytest.fixture(params=["ours", "orbax"])
def checkpointer(request, tmp_path):
    """A checkpointer with step 4, which has weights and two components."""
    if request.param == "ours":
        opened = frontend.Checkpointer([Persistent(tmp_path / "steps", every=1)])
    else:
        opened = ocp.training.Checkpointer(tmp_path / "stock")
    with opened:
        parts = {
            "state": {"w": jnp.arange(3.0)},
            "schedule": Component({"lr": 0.1}, "global"),
            "cache": Component([1, 2], "per_host"),
        }
        opened.save_checkpointables(4, parts)
        yield opened


def test_all_components_are_loaded_with_the_trees_that_are_asked_for(checkpointer):
    schedule, cache = Component(None, "global"), Component(None, "per_host")
    summary = loading.load(
        checkpointer,
        {"cache": cache, "schedule": schedule, "state": {"w": jnp.zeros(3)}},
    )
    assert (schedule.state, cache.state) == ({"lr": 0.1}, [1, 2])
    assert summary.step == 4
    assert list(summary.loaded) == ["cache", "schedule", "state"]
    assert summary.loaded["schedule"] is schedule
    assert summary.loaded["state"]["w"].tolist() == [0, 1, 2]
    assert not summary.skipped
    assert not summary.failed


def test_all_names_are_in_one_error(checkpointer):
    wanted = {
        "missing": Component(0, "global"),
        "absent": Component(0, "per_host"),
        "maybe": Component(0, "global", required=False),
        "schedule": Component(0, "global"),
    }
    with pytest.raises(errors.CheckpointError) as caught:
        loading.load(checkpointer, wanted, 4)
    for part in (
        "step 4",
        "'missing'",
        "'absent'",
        "'cache' was not asked for",
        "strict=",
    ):
        assert part in str(caught.value)
    assert "maybe" not in str(caught.value)
    assert wanted["schedule"].state == 0


def test_without_strict_what_there_is_is_loaded(checkpointer):
    wanted = {
        "missing": Component(0, "global"),
        "maybe": Component(0, "global", required=False),
        "schedule": Component(0, "global"),
    }
    summary = loading.load(checkpointer, wanted, strict=False)
    assert list(summary.loaded) == ["schedule"]
    assert sorted(summary.skipped) == ["cache", "maybe"]
    assert list(summary.failed) == ["missing"]
    assert "step 4 has no such part; it has" in summary.failed["missing"]
    # A name to ignore need not be asked for.
    schedule = {"schedule": wanted["schedule"]}
    assert list(loading.load(checkpointer, schedule, ignore=["cache"]).loaded)
    lines = str(summary).splitlines()
    assert lines[0] == "step 4: loaded schedule"
    assert lines[-1].startswith("failed missing: step 4")


def test_a_component_that_fails_leaves_the_others_as_they_were(checkpointer):
    schedule = Component("as before", "global")
    broken = Component(0, lambda: "per_nobody")
    # The one that can be read comes first.
    wanted = [("schedule", schedule), ("cache", broken)]
    with pytest.raises(
        errors.CheckpointError, match=r"'cache' cannot be loaded: .*per_nobody"
    ):
        loading.load(checkpointer, wanted)
    assert schedule.state == "as before"
    summary = loading.load(checkpointer, wanted, strict=False)
    assert schedule.state == {"lr": 0.1}
    assert list(summary.failed) == ["cache"]
    broken.required = False
    assert list(loading.load(checkpointer, wanted).failed) == ["cache"]


def test_doubled_names_are_named():
    pairs = [("b", 1), ("a", 2), ("b", 3), ("a", 4), ("c", 5)]
    with pytest.raises(errors.ConfigError, match=r"called \['a', 'b'\]"):
        loading.named(pairs)
    assert loading.named(pairs[:2]) == {"b": 1, "a": 2}
