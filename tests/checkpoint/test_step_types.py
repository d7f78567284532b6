"""Steps are integers of any type; all else is refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Persistent

INTEGERS = [
    3,
    np.int64(3),
    np.int32(3),
    np.uint8(3),
    np.array(3),
    jnp.int32(3),
    jnp.array(3),
]
REFUSED = {
    "-1": -1,
    "np.int64\\(-1\\)": np.int64(-1),
    "1.0": 1.0,
    "np.float64\\(1.0\\)": np.float64(1),
    "True": True,
    "np.True_": np.True_,
    "'3'": "3",
    r"array\(\[3\]\)": np.array([3]),
    r"Array\(3., dtype=float32": jnp.float32(3),
    r"\(3,\)": (3,),
}
STATE = {"w": jnp.ones(2)}


@pytest.fixture(params=["storage", "ram and storage"])
def checkpointer(request, tmp_path):
    tiers = [Persistent(tmp_path / "steps", every=1)]
    if request.param != "storage":
        tiers.append(Local(tmp_path / "ram"))
    with frontend.Checkpointer(tiers) as checkpointer:
        yield checkpointer


@pytest.mark.parametrize("step", INTEGERS, ids=repr)
def test_an_integer_of_any_type_is_a_step(step, checkpointer):
    assert checkpointer.should_save(step)
    assert checkpointer.save(step, STATE)
    checkpointer.record_metrics(step, {"loss": 1.5})
    checkpointer.wait()
    assert type(checkpointer.latest.step) is int
    assert [each.step for each in checkpointer.checkpoints] == [3]
    assert checkpointer.evaluations() == {3: {"loss": 1.5}}
    assert checkpointer.is_durable(step)
    assert checkpointer.load(step).keys() == STATE.keys()
    assert checkpointer.load_async(step).result().keys() == STATE.keys()
    assert checkpointer.metadata(step).step == 3
    assert checkpointer.delete(step)
    checkpointer.save(step, STATE)
    checkpointer.cancel(step)
    assert checkpointer.latest is None


@pytest.mark.parametrize(("name", "step"), REFUSED.items())
def test_what_is_no_step_is_refused_by_name(name, step, checkpointer):
    for call in (
        checkpointer.should_save,
        lambda step: checkpointer.save(step, STATE),
        lambda step: checkpointer.save(step, STATE, force=True),
        lambda step: checkpointer.save_checkpointables_async(step, {"state": STATE}),
        lambda step: checkpointer.record_metrics(step, {"loss": 1.5}),
        checkpointer.load,
        checkpointer.load_async,
        checkpointer.load_checkpointables,
        checkpointer.metadata,
        checkpointer.is_durable,
        checkpointer.delete,
        checkpointer.cancel,
    ):
        with pytest.raises(
            errors.CheckpointError, match=f"^{name}.* is not a step; give"
        ):
            call(step)
    assert checkpointer.save(1, STATE)
