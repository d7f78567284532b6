"""A start of a run that stood still while another start continued the run."""

import contextlib
import os
import signal

import pytest

from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps import layout
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.training import step_log
from tests import runs, shared_memory
from tests.multiprocess import test_stopped_run


@contextlib.contextmanager
def killed_at_last(started):
    """Kills a start of a run if the block raises: it may stand still."""
    try:
        yield
    except BaseException:
        os.killpg(started.pid, signal.SIGKILL)
        raise


@pytest.mark.slow
def test_nothing_that_a_replaced_start_writes_is_read(tmp_path, corpus):
    run = tmp_path / "tiny"
    with shared_memory.directory("replaced") as ram:
        config = runs.write_config(
            tmp_path,
            corpus,
            hosts=2,
            slices=2,
            elastic_enabled=True,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_period=2,
            multi_tier_checkpointing_backup_interval_steps=4,
            log_period=1,
        )
        # Two machines, with separate memory.
        of_a, of_b = (f"local_checkpoint_directory={ram}/{name}" for name in "ab")
        starting = test_stopped_run.start(config, of_a, leads_group=True)
        with starting as old, killed_at_last(old):
            for line in old.stdout:
                if line.startswith("step ") and len(runs.saved_steps(run)) > 1:
                    os.killpg(old.pid, signal.SIGSTOP)
                    break
            # File systems that machines share may have no locks.
            (run / run_files.LOCK).unlink()
            steps = runs.saved_steps(run)[-1] + 10
            ended = runs.cli("train", config, of_b, f"steps={steps}")
            assert ended.returncode == 0, ended.stdout + ended.stderr
            before = step_log.read(run)
            assert runs.saved_steps(run)[-1] == steps
            os.killpg(old.pid, signal.SIGCONT)
            output = old.stdout.read()
        assert old.returncode == 1, output
        assert output.count("has continued it as world 2, so this one stops") == 1
        first, second = step_log.read(run)
        assert [first.world, second.world] == [1, 2]
        # It has trained on, and logged that, until it was to commit a step.
        assert len(first.records) > len(before[0].records)
        assert second == before[1]
        lineage = step_log.lineage([first, second])
        assert [each.attempt for each in lineage.values()][second.start_step :] == (
            [2] * 10
        )
        assert runs.saved_steps(run)[-1] == steps
        assert run_files.read_events(str(run))[-1]["event"] == "run_finished"
        assert "PASSED" in runs.verb("audit", run)
        assert "PASSED" in runs.verb("verify", run)


def test_a_start_that_cannot_claim_its_world_in_storage_does_not_train(
    tmp_path, corpus
):
    config = runs.write_config(tmp_path, corpus, hosts=1)
    claimed = tmp_path / "tiny" / layout.STEPS / claims.DIRECTORY
    claimed.parent.mkdir(parents=True)
    # It can be neither listed nor written.
    claimed.write_text("")
    ended = runs.cli("train", config)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("are out of reach") == 1, ended.stderr
    assert "start the run again if it has ended" in ended.stderr
    assert not list((tmp_path / "tiny" / step_log.DIRECTORY).glob("*"))
