"""A run whose output directory is removed while it runs ends with an error."""

import fcntl
import shutil

import jax.numpy as jnp
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from tests import runs, shared_memory


@pytest.mark.slow
@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_run_whose_output_is_removed_ends_with_an_error(
    tmp_path, corpus, has_checkpoints
):
    config = runs.write_config(
        tmp_path,
        corpus,
        steps=10000 if has_checkpoints else 400,
        checkpoint_period=4,
        log_period=1,
        enable_checkpointing=has_checkpoints,
    )
    with runs.Started("train", config) as started:
        # It waits until its lines are read, long before its last step.
        fcntl.fcntl(started.stdout, fcntl.F_SETPIPE_SZ, 4096)
        said = []
        for line in started.stdout:
            said.append(line)
            if line.startswith("step 6"):
                shutil.rmtree(tmp_path / "tiny")
                break
        said += started.stdout
    output = "".join(said)
    assert started.returncode == 1, output
    assert f"{tmp_path}/tiny/" in output
    assert "was removed" in output
    # Nothing was written that looks like a run.
    assert not (tmp_path / "tiny" / "config.json").exists()
    assert not list((tmp_path / "tiny").glob("checkpoints/[0-9]*"))


@pytest.mark.parametrize("in_ram", [False, True])
def test_storage_that_is_removed_is_an_error_of_the_next_save(tmp_path, in_ram):
    steps = tmp_path / "steps"
    with shared_memory.directory("removed") as ram:
        tiers = [ec.Persistent(steps, every=1), *([ec.Local(ram)] if in_ram else [])]
        checkpointer = ec.Checkpointer(tiers, run="tiny")
        assert checkpointer.save(1, {"w": jnp.ones(4)})
        checkpointer.wait()
        shutil.rmtree(steps)

        def save(step):
            response = checkpointer.save_async(step, {"w": jnp.ones(4)})
            assert response.durable()

        with pytest.raises(errors.RunError, match=f"{steps} was removed"):
            save(2)
        with pytest.raises(errors.RunError, match="was removed"):
            checkpointer.save(3, {"w": jnp.ones(4)})
        with pytest.raises(errors.RunError, match="was removed"):
            checkpointer.close()
        assert not list(steps.glob("[0-9]*"))
