"""A run whose bucket takes no uploads for a while, then fails at random and lags."""

import collections
import dataclasses
import pathlib
import threading
import time

import pytest

from elastic_ckpt.checkpoint.stages import SaveStages
from elastic_ckpt.cli import main
from elastic_ckpt.core import jsonlog, metrics, storage
from elastic_ckpt.monitoring import summaries
from elastic_ckpt.training import trainer
from tests import faulty_buckets, runs
from tests.processes import claims, great_runs

# A backup is due at each fourth step; the steps at which an outage begins and ends.
OUTAGE = (5, 13)
LIMIT_SECS = 600.0


class Outage:
    """A store that takes no uploads while a run trains some steps.

    Args:
      path: the file that is there meanwhile.
      waits: a step after which the run waits, and for which count of calls of a method
        of the stages.
    """

    def __init__(self, path, waits):
        self._path, self._waits = pathlib.Path(path), waits
        self._backlog = []
        self._noted = collections.Counter()
        # Which has uploaded last.
        self._thread = None
        for name in ("_not_taken", "_upload"):
            self._note_calls(name)
        # Until the process ends.
        self._subscribed = summaries.subscribed(self._receive)
        self._subscribed.__enter__()

    def leaving(self, step):
        if step in self._waits:
            self._wait_for(*self._waits[step])
        if step == OUTAGE[0]:
            self._path.touch()
        if step == OUTAGE[1]:
            assert self._backlog[-1] == 2
            self._path.unlink()
        return None

    def _receive(self, metric, value):
        if metric is metrics.CHECKPOINT_BACKLOG:
            self._backlog.append(value)

    def _note_calls(self, name):
        # The events wait for the thread of the training.
        original = getattr(SaveStages, name)

        def noted(*arguments):
            result = original(*arguments)
            if name == "_upload":
                self._thread = threading.current_thread()
            self._noted[name] += 1
            return result

        setattr(SaveStages, name, noted)

    def _wait_for(self, name, count):
        until = time.monotonic() + LIMIT_SECS
        while self._noted[name] < count:
            assert time.monotonic() < until, self._noted
            time.sleep(0.01)
        if name == "_upload":
            # Until then the next backup is not begun.
            self._thread.join()


def train_through(path, config, settings, waits):
    """Trains while the outage of a file comes and goes."""
    train, outage = trainer.train, Outage(path, waits)
    if waits[OUTAGE[1]][0] == "_not_taken":  # uploads hang
        jsonlog.writer.__kwdefaults__["wait_secs"] = 0.5

    def paced(config, world):
        return train(config, dataclasses.replace(world, leaving=outage.leaving))

    trainer.train = paced
    return main.main(["train", str(config), *settings])


def survive(run):
    """An outage of the uploads; then requests that fail, and lists that lag."""
    faults = run.faults
    faults.outage = run.directory / "outage"
    faults.outage_kind = run.kind
    one = ["hosts=1", "slices=1", "elastic_enabled=false", "steps=20"]
    ended = runs.forked(
        train_through, str(faults.outage), str(run.config), one, run.waits
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert faults.happened[run.kind] > 0
    faults.outage = None
    faults.share, faults.lag_secs = 0.08, 1.0
    # The memory of before is lost.
    other = f"local_checkpoint_directory={run.ram}/other"
    run.train("elastic_enabled=false", "steps=28", other)
    faults.share = faults.lag_secs = 0.0


class BucketClaims(claims.Claims):
    """The claims about a run in a bucket, whose data is there, too.

    Attributes:
      place: the kind of the bucket.
      kind: how its uploads fail in the outage.
      waits: see `Outage`: refusals are reported by each upload, and those that hang by
        the next one.
    """

    place: str
    kind: str
    waits: tuple
    scenario = great_runs.Scenario(
        drive=survive,
        from_memory=False,
        settings={
            "local_checkpoint_period": 4,
            "multi_tier_checkpointing_backup_interval_steps": 4,
        },
    )

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, tmp_path_factory, corpus, object_stores):
        directory = tmp_path_factory.mktemp("great")
        bucket = f"{cls.place}://bucket/{directory.name}-{cls.place}"
        faults = faulty_buckets.Faults()
        with pytest.MonkeyPatch.context() as patched:
            for name, value in object_stores.items():
                patched.setenv(name, value)
            data = f"{bucket}/data/texts.array_record"
            storage.write_atomic(data, pathlib.Path(corpus).read_bytes())
            # Processes that start in the block see the failures.
            with faulty_buckets.before(object_stores, faults) as environment:
                for name, value in environment.items():
                    patched.setenv(name, value)
                scenario = dataclasses.replace(
                    cls.scenario,
                    settings={
                        **cls.scenario.settings,
                        "base_output_directory": bucket,
                        "grain_train_files": data,
                    },
                    drive=lambda run: cls.driven(run, faults),
                )
                with great_runs.great_run(scenario, directory, corpus) as finished:
                    yield finished

    @classmethod
    def driven(cls, run, faults):
        run.faults, run.kind, run.waits = faults, cls.kind, dict(cls.waits)
        survive(run)

    def test_the_outage_is_told_with_its_cause_and_no_step_is_missing(self, run):
        events = run.events()
        names = [each["event"] for each in events]
        events = events[: names.index("run_finished")]
        degraded = [
            each
            for each in events
            if each["event"] == "degraded" and each["tier"] == "persistent"
        ]
        (recovered,) = [e for e in events if e["event"] == "storage_recovered"]
        assert {each["cause"] for each in degraded} == {recovered["cause"]}
        assert recovered["step"] > OUTAGE[1]
        late = {each["step"] for each in degraded if "step log" not in each["why"]}
        assert {12} <= late <= {8, 12, 16}
        assert any("step log" in each["why"] for each in degraded)
        assert all("\n" not in each["why"] for each in degraded)

    def test_requests_failed_in_every_way_and_the_run_went_on(self, run):
        assert run.faults.happened.keys() >= set(faulty_buckets.ALL)
        assert run.faults.happened["lag"] > 0
        assert "from step 20 to step 28" in run.output
        assert "from persistent storage" in run.output


@pytest.mark.slow
class TestGs(BucketClaims):
    place, kind = "gs", faulty_buckets.HELD
    waits = ((5, ("_upload", 1)), (13, ("_not_taken", 1)))


@pytest.mark.slow
class TestS3(BucketClaims):
    place, kind = "s3", faulty_buckets.FORBIDDEN
    waits = ((5, ("_upload", 1)), (9, ("_upload", 2)), (13, ("_upload", 3)))
