"""`elastic-ckpt train` ends with status 1 and one error if a step is not stored."""

import errno
import os
import pathlib
import time

import pytest

from elastic_ckpt.cli import main
from elastic_ckpt.core import storage
from tests import runs, shared_memory

LIMIT_SECS = 1200


@pytest.fixture
def config(tmp_path, corpus):
    with shared_memory.directory("unstored") as ram:
        yield runs.write_config(
            tmp_path,
            corpus,
            grain_use_elastic_iterator=True,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=2,
            multi_tier_checkpointing_backup_interval_steps=4,
        )


def train_on_full_storage(config, directory):
    """Trains in this process, in which nothing can be written below a directory."""
    write = storage.write_atomic

    def write_atomic(target, content, **options):
        if os.fspath(target).startswith(directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(target, content, **options)

    storage.write_atomic = write_atomic
    return main.main(["train", config])


def one_error(ended):
    """The only error of a program that has ended with status 1."""
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.splitlines()
    (error,) = (line for line in lines if line.startswith("elastic-ckpt train:"))
    return error


@pytest.mark.slow
def test_a_step_that_full_storage_lacks_at_the_end_is_one_error(config, tmp_path):
    checkpoints = str(tmp_path / "tiny" / "checkpoints")
    ended = runs.forked(train_on_full_storage, str(config), checkpoints)
    error = one_error(ended)
    assert "step 12 was due in persistent storage and is not there" in error
    assert "No space left on device" in error
    assert "make room there" in error
    causes = {each["cause"] for each in runs.events(tmp_path / "tiny", "degraded")}
    # A step that is due while the one before is tried waits for it.
    assert causes - {"slow"} == {"full"}


@pytest.mark.slow
def test_elastic_slices_without_a_directory_in_memory_are_refused(config, tmp_path):
    settings = ("local_checkpoint_directory=", "hosts=2", "slices=2")
    ended = runs.cli(
        "train", config, *settings, "elastic_enabled=true", "run_name=noram"
    )
    assert ended.returncode == 78, ended.stdout + ended.stderr
    assert "local_checkpoint_directory=''" in ended.stderr
    assert not (tmp_path / "noram").exists()


@pytest.mark.slow
def test_hosts_of_a_run_whose_storage_goes_away_end_with_one_error(config, tmp_path):
    run, away = tmp_path / "tiny", tmp_path / "away"
    output = pathlib.Path(tmp_path, "output.txt")
    settings = ("hosts=2", "slices=2", "steps=1000000")
    (run / "checkpoints").parent.mkdir()
    away.mkdir()
    (run / "checkpoints").symlink_to(away)
    with runs.Started("train", config, *settings, output=output) as started:
        deadline = time.monotonic() + LIMIT_SECS
        while not (run / "events.jsonl").exists() or not runs.events(run, "backed_up"):
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        # A file is where the directory was.
        (tmp_path / "file").write_text("not a directory")
        (tmp_path / "file").replace(run / "checkpoints")
        while not runs.events(run, "degraded"):
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        started.terminate()
        assert started.wait() == 1, output.read_text()
    lines = output.read_text().splitlines()
    (error,) = (line for line in lines if line.startswith("elastic-ckpt train:"))
    # The step that it ended with.
    step = runs.events(run, "saved")[-1]["step"]
    assert f"step {step} was due in persistent storage and is not there" in error
    assert not [line for line in lines if line.startswith("Traceback")]
