"""Steps are integers of any type; all else is refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Persistent

INTEGERS = (int, np.int64, np.int32, np.uint8, np.array, jnp.int32, jnp.array)
STATE = {"w": np.ones(2)}


@pytest.fixture
def checkpointer(tmp_path):
    tiers = [Local(tmp_path / "ram"), Persistent(tmp_path / "steps", every=1)]
    with frontend.Checkpointer(tiers) as checkpointer:
        yield checkpointer


def test_an_integer_of_any_type_is_a_step(checkpointer):
    for number, kind in enumerate(INTEGERS, start=3):
        step = kind(number)
        assert checkpointer.should_save(step)
        assert checkpointer.save(step, STATE)
        checkpointer.record_metrics(step, {"loss": 1.5})
        checkpointer.wait()
        assert type(checkpointer.latest.step) is int
        assert [each.step for each in checkpointer.checkpoints] == [number]
        assert checkpointer.evaluations() == {number: {"loss": 1.5}}
        assert checkpointer.is_durable(step)
        assert checkpointer.load(step, STATE).keys() == STATE.keys()
        assert checkpointer.load_async(step, STATE).result().keys() == STATE.keys()
        assert checkpointer.metadata(step).step == number
        assert checkpointer.delete(step)
        checkpointer.save(step, STATE)
        checkpointer.cancel(step)
        assert checkpointer.latest is None


def test_what_is_no_step_is_refused_by_name(checkpointer):
    calls = (
        checkpointer.should_save,
        lambda step: checkpointer.save(step, STATE),
        lambda step: checkpointer.save_checkpointables_async(step, {"state": STATE}),
        lambda step: checkpointer.record_metrics(step, {"loss": 1.5}),
        checkpointer.load,
        checkpointer.load_async,
        checkpointer.load_checkpointables,
        checkpointer.metadata,
        checkpointer.is_durable,
        checkpointer.delete,
        checkpointer.cancel,
    )
    refused = {
        "-1": -1,
        r"np.int64\(-1\)": np.int64(-1),
        "1.0": 1.0,
        "True": True,
        "np.True_": np.True_,
        "'3'": "3",
        r"array\(\[3\]\)": np.array([3]),
        r"Array\(3., dtype=float32": jnp.float32(3),
    }
    for name, step in refused.items():
        for call in calls:
            message = f"^{name}.* is not a step; give"
            with pytest.raises(errors.CheckpointError, match=message):
                call(step)
    assert checkpointer.save(1, STATE)
