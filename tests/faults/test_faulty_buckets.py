"""Runs whose buckets refuse, break off, delay and lag come to their end."""

import collections
import dataclasses
import pathlib
import threading
import time

import pytest

from elastic_ckpt.checkpoint import due_steps
from elastic_ckpt.cli import main
from elastic_ckpt.core import metrics, segmented_log, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.monitoring import subscription
from elastic_ckpt.tiers.persistent import persistent_root
from elastic_ckpt.training import job
from tests import faulty_buckets, runs, shared_memory

# A backup is due at each fourth step; the steps at which an outage begins and ends.
OUTAGE = (5, 13)
LIMIT_SECS = 600.0


@pytest.fixture
def faults(object_stores, bucket, monkeypatch):
    """The failures that processes see which start in the test."""
    del bucket
    faults = faulty_buckets.Faults()
    with faulty_buckets.before(object_stores, faults) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield faults


@pytest.fixture
def config(bucket, tmp_path, corpus):
    """A run with its data, its files and its steps in a bucket."""
    data = f"{bucket}/data/texts.array_record"
    with open(corpus, "rb") as file:
        storage.write_atomic(data, file.read())
    return runs.write_config(
        tmp_path,
        data,
        base_output_directory=bucket,
        grain_use_elastic_iterator=True,
    )


def train(config, *settings):
    ended = runs.cli("train", config, *settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


class Outage:
    """A store that takes no uploads while a run trains some steps.

    Args:
      path: the file that is there meanwhile.
      waits: a step after which the run waits, and for which count of calls of a method
        of the backlog.
    """

    def __init__(self, path, waits):
        self._path, self._waits = pathlib.Path(path), waits
        self._backlog = []
        self._noted = collections.Counter()
        # Which has called `end` last.
        self._thread = None
        for name in ("fail", "end"):
            self._note_calls(name)
        subscription.Subscription(self._receive)

    def should_stop(self, step):
        if step in self._waits:
            self._wait_for(*self._waits[step])
        if step == OUTAGE[0]:
            self._path.touch()
        if step == OUTAGE[1]:
            assert self._backlog[-1] == 2
            self._path.unlink()
        return False

    def _receive(self, metric, value):
        if metric is metrics.CHECKPOINT_BACKLOG:
            self._backlog.append(value)

    def _note_calls(self, name):
        # The events wait for the thread of the training.
        original = getattr(due_steps.DueSteps, name)

        def noted(*arguments):
            original(*arguments)
            if name == "end":
                self._thread = threading.current_thread()
            self._noted[name] += 1

        setattr(due_steps.DueSteps, name, noted)

    def _wait_for(self, name, count):
        until = time.monotonic() + LIMIT_SECS
        while self._noted[name] < count:
            assert time.monotonic() < until, self._noted
            time.sleep(0.01)
        if name == "end":
            # Until then the next backup is not begun.
            self._thread.join()


def train_through(path, config, waits):
    """Trains while the outage of a file comes and goes."""
    train, outage = job.train, Outage(path, waits)
    if waits[OUTAGE[1]][0] == "fail":  # uploads hang
        segmented_log.SegmentedLog.__init__.__kwdefaults__["wait_secs"] = 0.5

    def paced(config, world):
        return train(config, dataclasses.replace(world, should_stop=outage.should_stop))

    job.train = paced
    return main.main(["train", str(config)])


def check(run):
    """All that was saved can be read, and each step had its batch."""
    # In separate processes: clients keep to the proxies, which end with the test.
    for verb in ("verify", "audit"):
        ended = runs.cli(verb, run)
        assert "PASSED" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.night
@pytest.mark.parametrize("bucket", ["s3", "gs"], indirect=True)
def test_a_run_survives_refusals_and_broken_connections(config, faults, bucket):
    faults.share = 0.08
    train(config, "steps=8")
    assert "from step 8 to step 12" in train(config, "steps=12")
    faults.share = 0.0
    assert faults.happened.keys() == set(faulty_buckets.ALL)
    check(f"{bucket}/tiny")


@pytest.mark.night
@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_run_survives_lists_that_lag(config, faults, bucket):
    faults.lag_secs = 1.0
    train(config, "steps=8")
    assert "from step 8 to step 12" in train(config, "steps=12")
    faults.lag_secs = 0.0
    assert faults.happened["lag"] > 0
    check(f"{bucket}/tiny")


# The client of GCS tries for two minutes before it reports the same.
@pytest.mark.night
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_a_store_that_refuses_all_is_one_error_and_loses_nothing(
    config, faults, bucket
):
    train(config, "steps=8")
    faults.share, faults.kinds = 1.0, (faulty_buckets.UNAVAILABLE,)
    ended = runs.cli("train", config, "steps=12")
    assert ended.returncode == 1
    *_, message = ended.stderr.splitlines()
    assert message.startswith(f"elastic-ckpt train: {bucket}/data/")
    assert "in 4 tries ([Errno 16] Service Unavailable)" in message
    faults.share = 0.0
    assert "from step 8 to step 12" in train(config, "steps=12")
    check(f"{bucket}/tiny")


@pytest.mark.parametrize(
    ("bucket", "kind", "cause"),
    [
        ("gs", faulty_buckets.HELD, "slow"),
        # Clients try again for minutes before they report it.
        ("gs", faulty_buckets.UNAVAILABLE, "slow"),
        ("s3", faulty_buckets.FORBIDDEN, "refused"),
    ],
    indirect=["bucket"],
)
@pytest.mark.slow
def test_a_run_trains_on_while_its_bucket_takes_no_uploads(
    faults, bucket, tmp_path, corpus, kind, cause
):
    faults.outage, faults.outage_kind = tmp_path / "outage", kind
    # Refusals are reported by each upload, and those that hang by the next one.
    waits = {5: ("end", 1), 13: ("fail", 1)}
    if cause == "refused":
        waits |= {9: ("end", 2), 13: ("end", 3)}
    with shared_memory.directory("outage") as ram:
        config = runs.write_config(
            tmp_path,
            corpus,
            base_output_directory=bucket,
            grain_use_elastic_iterator=True,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=4,
            multi_tier_checkpointing_backup_interval_steps=4,
            steps=20,
        )
        ended = runs.forked(train_through, str(faults.outage), str(config), waits)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert faults.happened[kind] > 0
    events = run_files.read_events(f"{bucket}/tiny")
    degraded = [each for each in events if each["event"] == "degraded"]
    late = {each["step"]: each for each in degraded if "step log" not in each["why"]}
    assert {each["tier"] for each in degraded} == {"persistent"}
    assert {each["cause"] for each in degraded} == {cause}
    assert {12} <= late.keys() <= {8, 12, 16}
    assert all("\n" not in each["why"] for each in degraded)
    (recovered,) = [each for each in events if each["event"] == "storage_recovered"]
    assert recovered["cause"] == cause
    assert recovered["step"] > OUTAGE[1]
    assert any("step log" in each["why"] for each in degraded)
    root = persistent_root.PersistentRoot.from_path(f"{bucket}/tiny/checkpoints")
    assert {4, 20} <= {*root.steps()}
    check(f"{bucket}/tiny")
