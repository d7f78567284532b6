"""`latest`, `checkpoints` and `metadata` return the same of a step as Orbax's."""

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors

KEPT = {"keep": ocp.training.preservation_policies.PreserveAll()}
METRICS = {"loss": 0.5, "nested": {"a": [1, 2]}}
CUSTOM = {"note": "x", "numbers": [1, 2.5, None]}


def noted(checkpoint):
    return checkpoint.step, checkpoint.metrics, checkpoint.custom_metadata


def test_a_step_has_its_metrics_and_metadata_wherever_it_is_found(make, tmp_path):
    checkpointer = make(every=2, local=KEPT)
    checkpointer.save(1, {"w": jnp.ones(2)})
    checkpointer.save(2, {"w": jnp.ones(2)}, metrics=METRICS, custom_metadata=CUSTOM)
    expected = [(1, None, None), (2, METRICS, CUSTOM)]
    assert noted(checkpointer.latest) == expected[1]
    assert list(map(noted, checkpointer.checkpoints)) == expected
    assert noted(checkpointer.metadata()) == expected[1]
    assert noted(checkpointer.checkpointables_metadata(1)) == expected[0]
    checkpointer.close()
    from_ram, from_storage = make(local=KEPT), make(ram="other ram")
    assert noted(from_ram.latest) == noted(from_storage.latest) == expected[1]
    assert list(map(noted, from_ram.checkpoints)) == expected
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        assert stock.latest.metrics == METRICS
        ours, theirs = from_storage.metadata(2), stock.metadata(2)
        assert noted(theirs) == noted(ours)
        seconds = theirs.commit_timestamp_nsecs - ours.commit_timestamp_nsecs
        assert 0 <= seconds < 600e9


def test_steps_that_orbax_alone_saved_are_listed_with_what_they_have(make, tmp_path):
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        for step in (3, 7):
            stock.save(
                step, {"n": step}, metrics={"loss": step}, custom_metadata=CUSTOM
            )
        expected = [(3, {"loss": 3}, CUSTOM), (7, {"loss": 7}, CUSTOM)]
        committed = [
            each.commit_timestamp_nsecs for each in map(stock.metadata, (3, 7))
        ]
    checkpointer = make(local=KEPT)
    assert list(map(noted, checkpointer.checkpoints)) == expected
    times = [each.commit_timestamp_nsecs for each in checkpointer.checkpoints]
    assert times == committed
    assert noted(checkpointer.latest) == noted(checkpointer.metadata()) == expected[1]
    assert checkpointer.save(8, {"n": 8})
    checkpointer.wait()
    assert [each.step for each in checkpointer.checkpoints] == [3, 7, 8]
    assert checkpointer.load(3) == {"n": 3}


def test_a_step_that_exists_is_saved_only_to_overwrite_it(make, tmp_path):
    checkpointer = make(local=KEPT)
    with ocp.training.Checkpointer(tmp_path / "stock") as stock:
        for each in (stock, checkpointer):
            for step in (2, 4):
                assert each.save(step, {"n": step})
            for step, force in [(2, False), (4, False), (4, True)]:
                with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
                    each.save(step, {"n": 0}, force=force)
            assert not each.save(3, {"n": 3})
            assert each.load(4) == {"n": 4}
    with pytest.raises(errors.CheckpointError, match="step 2 already exists"):
        checkpointer.save_checkpointables(2, {"state": {"n": 0}})
    assert checkpointer.save(4, {"n": 5}, overwrite=True)
    assert checkpointer.load() == {"n": 5}
