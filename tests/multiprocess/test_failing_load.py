"""A component that one host cannot load fails the load on all, and the next works."""

import asyncio

import pytest

from elastic_ckpt.checkpoint.components import loading
from elastic_ckpt.core import errors, topology
from tests.multiprocess import machines, tier_worlds

FAILS = 1


class Failing(tier_worlds.Counter):
    """A component that cannot be loaded, or does not return."""

    def __init__(self, *, hangs):
        super().__init__()
        if hangs:
            self.save_timeout_secs = 1.0
        self._hangs = hangs

    async def load(self, directory):
        del directory
        if self._hangs:
            await asyncio.sleep(3600)
        raise ValueError("cut in two")


def fail_and_go_on(checkpointer, mesh):
    """Loads a step with a component that fails on one host, in each way."""
    parts = {"state": tier_worlds.state(mesh, 1, True), "data": tier_worlds.Counter(1)}
    parts["more"] = tier_worlds.Counter(1)
    assert checkpointer.save_checkpointables(1, parts)
    checkpointer.wait()
    is_here = topology.this_host() == FAILS
    for hangs, why in ((False, "cut in two"), (True, "not loaded in time")):

        def wanted(*, hangs=hangs):
            more = Failing(hangs=hangs) if is_here else tier_worlds.Counter()
            return {"data": tier_worlds.Counter(), "more": more}

        with pytest.raises(errors.CheckpointError) as strict:
            loading.load(checkpointer, wanted(), ignore=["state"])
        assert f"host {FAILS}: 'more' cannot be loaded: " in str(strict.value)
        assert why in str(strict.value)
        parts = wanted()
        summary = loading.load(checkpointer, parts, strict=False)
        assert list(summary.failed) == (["more"] if is_here else [])
        assert parts["data"].step == 1
        # As the trainer does it.
        with pytest.raises(Exception, match=why) as plain:
            checkpointer.load_checkpointables(1, wanted())
        assert "more" in str(plain.value) or (is_here and not hangs)
        if not is_here:
            assert f"host {FAILS}: 'more' was not loaded: " in str(plain.value)
    # One of a name that only this host asks for.
    absent = {"absent": tier_worlds.Counter()} if is_here else {}
    with pytest.raises(errors.CheckpointError, match=f"host {FAILS}: 'absent' cannot"):
        loading.load(checkpointer, {**wanted(), **absent}, ignore=["state"])
    good = {"data": tier_worlds.Counter(), "more": tier_worlds.Counter()}
    assert list(loading.load(checkpointer, good).loaded) == ["data", "more"]
    tier_worlds.restore(checkpointer, mesh, step=1, sharded=True)


@pytest.mark.slow(minutes=0.3)
def test_a_component_that_one_host_cannot_load_fails_on_all(tmp_path):
    with machines.Machines() as ram:
        ram.start_agents(range(3))
        tier_worlds.run(
            fail_and_go_on,
            num_hosts=3,
            directories=[ram.directory(number) for number in range(3)],
            logs=tmp_path / "logs",
            persistent=str(tmp_path / "steps"),
        )
