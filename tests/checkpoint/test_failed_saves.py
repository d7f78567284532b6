"""A save that fails names its cause, in its event and to `close`, and no other."""

import asyncio
import errno
import os

import jax.numpy as jnp
import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Persistent
from tests.recorded_events import RecordedEvents

REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


class Failing:
    """A component that cannot be saved."""

    save_timeout_secs = 1.0

    def __init__(self, error, *, when):
        self._error = error
        self._when = when

    async def save(self, directory):
        if self._when == "at once":
            raise self._error

        async def write():
            await directory.await_creation()
            if self._error is None:
                await asyncio.sleep(3600)
            raise self._error

        return write()

    async def load(self, directory):
        raise NotImplementedError


FAILURES = {
    "a bug": (TypeError("no such thing"), "at once", "no such thing"),
    "a late bug": (ValueError("cut in two"), "later", "cut in two"),
    "a service of its own": (REFUSED, "later", "Connection refused"),
    "a wrong state": (errors.DataError("no position"), "later", "no position"),
    "one that hangs": (None, "later", r"\['data'\] were not saved in time"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "ram and storage") for name in FAILURES), ("a late bug", "storage")],
)
def test_a_component_that_fails_is_not_blamed_on_storage(name, kind, tmp_path):
    error, when, message = FAILURES[name]
    tiers = [Persistent(tmp_path / "steps", every=1)]
    if kind != "storage":
        tiers.append(Local(tmp_path / "ram"))
    recorded = RecordedEvents()
    checkpointer = frontend.Checkpointer(tiers, emit=recorded)
    state = {"w": jnp.ones(2)}
    assert checkpointer.save(1, state)
    parts = {"state": state, "data": Failing(error, when=when)}
    if when == "at once":
        with pytest.raises(TypeError, match=message):
            checkpointer.save_checkpointables(2, parts)
    else:
        assert not checkpointer.save_checkpointables(2, parts)
    with pytest.raises(errors.CheckpointError, match=message) as caught:
        checkpointer.close()
    told = str(caught.value)
    assert told.startswith("step 2 was due in persistent storage and is not there: it")
    assert "correct the component" in told
    assert "no tier has it" in told
    for elsewhere in ("storage back", "faster storage", "RAM has", "bring it"):
        assert elsewhere not in told
    assert [each["cause"] for each in recorded.named("degraded")] == ["component"]
    # Storage had not failed, so it does not recover.
    with frontend.Checkpointer(tiers, emit=recorded) as checkpointer:
        assert checkpointer.latest.step == 1
        assert not checkpointer.save_checkpointables(
            2, {"state": state, "data": Failing(REFUSED, when="later")}
        )
        assert checkpointer.save(3, state)
        checkpointer.wait()
        assert checkpointer.is_durable(3)
    assert not recorded.named("storage_recovered")
