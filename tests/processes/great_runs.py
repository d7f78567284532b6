"""Great runs: one run of real processes each, to which much happens.

A `Scenario` says how the run is configured, what befalls it, and what it has to tell.
`claims.Claims` are the tests that every great run passes; they read what it has left.
"""

import contextlib
import dataclasses
import functools
import pathlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import step_log
from tests import corpora, jobs, runs, shared_memory

# Events that tell of faults, and of what is done about them, with what they name.
TELLING = {
    "slice_lost": "slice",
    "slice_preempted": "slice",
    "slice_returned": "slice",
    "slice_refused": "slice",
    "slice_quarantined": "slice",
    "scale_requested": "slices",
    "leader_lost": "machine",
    "restore_distrusted": "why",
    "divergence_found": "callback",
    "rolled_back": "rollbacks",
}
# The one-host run has these, too.
TRAINING = {
    "global_batch_size": 12,
    "learning_rate": 1e-4,
    "colocated_python_data_input": False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A great run.

    Attributes:
      drive: starts it once or more often, until it has ended.
      slices: of one host each.
      faults: that the supervisor injects.
      training: makes the settings that the one-host run has, too, for a directory.
      settings: all others.
      tells: the events of `TELLING` that the run has, each with what it names; those of
        several faults may come in any order.
      verdicts: their kinds.
      from_memory: whether nothing is restored from storage.
      redoes: whether steps may be trained again.
      memory: whether it has checkpoints in RAM.
      replaced: claims of starts that trained on after another one replaced them.
    """

    drive: Callable[["Run"], None]
    slices: int = 2
    faults: Sequence[Mapping[str, Any]] = ()
    training: Callable[[pathlib.Path], Mapping[str, Any]] = lambda _: {}
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tells: Sequence[str] = ()
    verdicts: Sequence[str] = ()
    from_memory: bool = True
    redoes: bool = True
    memory: bool = True
    replaced: Sequence[int] = ()


def mixture(directory):
    """The settings of a packed mixture of two Parquet files, which are written."""
    for name, numbers in (("odd", range(1, 120, 2)), ("even", range(0, 80, 2))):
        texts = [f"text {number} ".encode() * (1 + number % 7) for number in numbers]
        rows = [{"text": text} for text in texts]
        corpora.write_parquet(directory / f"{name}.parquet", rows)
    return {
        "grain_train_files": f"{directory}/odd.parquet,1;{directory}/even.parquet,3",
        "grain_file_type": "parquet",
        "num_logical_shards": 12,
        "packing": True,
        "use_truncation": False,
        "max_target_length": 32,
    }


class Run:
    """A great run, while it is driven and after its end.

    Attributes:
      path: its directory, which may be in a bucket.
      output: of all of its starts.
      code: of the last one.
    """

    def __init__(self, scenario, directory, corpus, ram):
        self.scenario, self.directory, self.ram = scenario, directory, ram
        self.corpus = corpus
        self.training = TRAINING | {**scenario.training(directory)}
        self.config = configured(directory, corpus, ram, **self.settings)
        base = scenario.settings.get("base_output_directory", directory)
        self.path = storage.absolute(base) / "tiny"
        self.output, self.code = "", None

    @property
    def settings(self):
        """The settings of the run."""
        scenario = self.scenario
        slices = scenario.slices
        settings = {"hosts": slices, "slices": slices, "faults": [*scenario.faults]}
        if not scenario.memory:
            settings["enable_multi_tier_checkpointing"] = False
            settings["elastic_enabled"] = False
        return settings | {**self.training, **scenario.settings}

    def start(self, *settings, leads_group=False):
        """Starts it in the background."""
        return runs.Started("train", self.config, *settings, leads_group=leads_group)

    def train(self, *settings):
        """Trains to the last step."""
        ended = runs.cli("train", self.config, *settings)
        self.output += ended.stdout + ended.stderr
        self.code = ended.returncode
        assert self.code == 0, self.output

    def train_until(
        self,
        shown: str,
        *settings,
        act: Callable[[runs.Started], object] = runs.Started.terminate,
        leads_group=False,
    ):
        """Trains on; does `act` at the first step after a line that contains `shown`.

        Returns:
          The output of this start.
        """
        output, is_shown, has_acted = "", False, False
        with self.start(*settings, leads_group=leads_group) as started:
            for line in started.stdout:
                output += line
                if is_shown and not has_acted and line.startswith("step "):
                    has_acted = True
                    act(started)
                is_shown |= shown in line
        self.output += output
        self.code = started.returncode
        assert has_acted, output
        return output

    def stop_after(self, shown, *settings, **options):
        """As `train_until`, with SIGTERM; the last step has to be saved."""
        output = self.train_until(shown, *settings, **options)
        assert self.code == 128 + signal.SIGTERM, output
        return self.stopped(output)

    def stopped(self, output):
        """The step after which a start of the run was stopped, and saved."""
        event = self.events("run_stopped")[-1]
        assert event["saved"] is True
        step = event["step"]
        assert f"stopped after step {step}, which is saved; the same command" in output
        return step

    def events(self, *names):
        """The events of some names, in order; all without any."""
        found = run_files.read_events(str(self.path))
        return [each for each in found if not names or each["event"] in names]

    @functools.cached_property
    def records(self):
        """The steps that count, in order."""
        lineage = step_log.lineage(self.attempts)
        return [lineage[step] for step in sorted(lineage)]

    @functools.cached_property
    def attempts(self):
        return step_log.read(self.path)

    @functools.cached_property
    def of_one_host(self):
        return self.one_host(len(self.records))

    def one_host(self, steps):
        """The steps of one device of this process that is never stopped."""
        directory = self.directory / f"one_host_{steps}"
        config = jobs.configured(
            directory,
            self.corpus,
            **self.training,
            steps=steps,
            enable_checkpointing=False,
        )
        jobs.trained(jobs.assembled(config, slices=1, devices=1))
        (attempt,) = step_log.read(directory / "tiny")
        return list(attempt.records)


def configured(directory, corpus, ram, **settings):
    """A configuration of an elastic run that would not end by itself."""
    values = {
        **TRAINING,
        # Many more than hosts train until they have agreed on a step to leave after.
        "steps": 1_000_000,
        "checkpoint_period": 1000,
        "elastic_enabled": True,
        "elastic_min_slice_count": 1,
        "elastic_settle_seconds": 0,
        "termination_grace_period_seconds": 900,
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": ram,
        "local_checkpoint_period": 5,
        "peer_copies": 1,
        "multi_tier_checkpointing_backup_interval_steps": 1_000_000,
        **settings,
    }
    return runs.write_config(pathlib.Path(directory), corpus, **values)


@contextlib.contextmanager
def great_run(scenario, directory, corpus):
    """Runs a scenario to its end; what it has left is there while the block lasts."""
    with shared_memory.directory("great") as ram:
        run = Run(scenario, directory, corpus, ram)
        scenario.drive(run)
        yield run
