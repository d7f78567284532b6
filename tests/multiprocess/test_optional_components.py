"""An optional component that one host cannot save is left out of the step on all."""

import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from tests.multiprocess import machines, tier_worlds


class Broken:
    """An object that does not give its state."""

    def get_state(self):
        raise ValueError("no such state")

    def set_state(self, state):
        raise NotImplementedError


def save_and_load(checkpointer, mesh):
    """Saves a step without the component, and one with it."""
    host = topology.this_host()
    for step, can_save in ((1, False), (2, True)):
        state = host if can_save or host == 0 else Broken()
        cache = ec.components.Component(state, "per_host", required=False)
        parts = {"state": tier_worlds.state(mesh, step, True), "cache": cache}
        parts["count"] = ec.components.Component(step, "global", required=False)
        assert checkpointer.save_checkpointables(step, parts)
        why = cache.save_problem or ""
        assert ("host 1: ValueError('no such state')" in why) != can_save
        assert parts["count"].save_problem is None
        cache = ec.components.Component(7, "per_host", required=False)
        wanted = {"cache": cache, "count": ec.components.Component(0, "global")}
        summary = ec.components.load(checkpointer, wanted, ignore=["state"])
        assert list(summary.skipped) == ([] if can_save else ["cache"])
        assert cache.state == (host if can_save else 7)
        assert wanted["count"].state == step
        held = checkpointer.checkpointables_metadata(step).metadata
        assert ("cache" in held) == can_save


@pytest.mark.slow(minutes=0.2)
def test_a_step_has_an_optional_component_of_all_hosts_or_of_none(tmp_path):
    with machines.Machines() as ram:
        ram.start_agents(range(2))
        events = tier_worlds.run(
            save_and_load,
            num_hosts=2,
            directories=[ram.directory(number) for number in range(2)],
            logs=tmp_path / "logs",
            persistent=str(tmp_path / "steps"),
        )
    whys = [each["why"] for each in events if each["event"] == "degraded"]
    (why,) = [each for each in whys if "optional" in each]
    assert why.startswith("it is saved without the optional component 'cache': host 1")
    assert not (tmp_path / "steps" / "1" / "cache").exists()
