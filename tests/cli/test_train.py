"""How `elastic-ckpt train` ends if it is refused, or if a step is not stored."""

import errno
import os

import jax
import pytest

from elastic_ckpt.cli import main, train
from elastic_ckpt.core import errors, storage
from elastic_ckpt.elastic import failures
from tests import runs, shared_memory

LIMIT_SECS = 1200
RAM_NOWHERE = [
    "enable_multi_tier_checkpointing=true",
    "local_checkpoint_directory=/proc/x",
    "local_checkpoint_period=2",
    "multi_tier_checkpointing_backup_interval_steps=4",
]


@pytest.fixture
def config(tmp_path, corpus):
    with shared_memory.directory("unstored") as ram:
        yield runs.write_config(
            tmp_path,
            corpus,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=2,
            multi_tier_checkpointing_backup_interval_steps=4,
        )


def train_on_full_storage(config, directory):
    """Trains in this process, in which nothing can be written below a directory."""
    write = storage.write_atomic

    def write_atomic(target, content, **options):
        path = os.fspath(target)
        # Records of worlds fit.
        if path.startswith(directory) and "/worlds/" not in path:
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
def test_start_that_is_refused_is_one_line_and_changes_nothing(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=4)
    done = runs.cli("train", config)
    assert done.returncode == 0, done.stderr

    def content():
        # Not its logs, which may grow.
        kept = [tmp_path / "tiny" / name for name in ("checkpoints", "step_log")]
        files = [path for each in kept for path in each.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files}

    before = content()
    for overrides, code, said in (
        (["hots=2"], errors.CONFIG_EXIT_CODE, "unknown key 'hots'; the nearest key is"),
        (["base_output_directory=/sys"], errors.CONFIG_EXIT_CODE, "/sys/tiny: "),
        (["hosts=2", *RAM_NOWHERE], 1, "the RAM directory /proc/x"),
    ):
        ended = runs.cli("train", config, *overrides)
        assert ended.returncode == code, ended.stderr
        (line,) = ended.stderr.splitlines()
        assert line.startswith("elastic-ckpt train: ")
        assert said in line
    assert content() == before
    assert "finished at step 4" in runs.cli("train", config).stdout


@pytest.mark.slow
def test_step_that_full_storage_lacks_at_the_end_is_one_error(config, tmp_path):
    checkpoints = str(tmp_path / "tiny" / "checkpoints")
    ended = runs.forked(train_on_full_storage, str(config), checkpoints)
    error = one_error(ended)
    assert "step 12 was due in persistent storage but is not there" in error
    assert "No space left on device" in error
    assert "free up space there" in error
    causes = {each["cause"] for each in runs.events(tmp_path / "tiny", "degraded")}
    # A step that is due while the one before is tried waits for it.
    assert causes - {"slow"} == {"full"}


def test_what_the_program_lacks_is_named_in_one_line():
    said = (
        r"^host 0 failed: the program needs more memory than its devices have at .*"
        r"test_train.py:\d+: .* allocating 4,194,304.00 GiB; lower"
    )
    with pytest.raises(failures.ProgramFailedError, match=said), train._in_words():
        jax.numpy.zeros((1 << 50,), "float32").block_until_ready()
    shapes = "combines arrays of mismatched shapes at .* incompatible shapes"
    with pytest.raises(failures.ProgramFailedError, match=shapes), train._in_words():
        jax.numpy.add(jax.numpy.zeros(3), jax.numpy.zeros(4))
