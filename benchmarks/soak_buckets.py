"""Suite `soak_buckets`: a run in a bucket that is killed twenty times at random.

Each start of the run is killed (SIGKILL) at a random moment of its first steps, in
which it uploads, commits and removes steps; the seed is printed. At last it trains to
its end, and is verified and audited. The object stores are emulators in another process
(`tests.buckets`); names without an ending are of GCS.

* `committed_steps_lost`: steps that were committed and missing at the next start; 0.
* `incomplete_steps`: committed steps that are not whole; 0.
* `leftovers`: unfinished steps after a kill, the most; two by the page of the tiers.
* `leftover_ratio`: the bytes of the largest of them, over those of a step times the
  uploads since the last commit; at most 1.
* `failed`: commands that fail, of the last `train`, `verify` and `audit`; 0.
* `kills`, `committed_steps`: how many there were.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import re
import signal
import tempfile
import time
from unittest import mock

from etils import epath

from benchmarks import report, storage_buckets
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from tests import corpora, runs

_NUM_KILLS = 20
_PERIOD = 2
# A start is killed within this part of the time until its first step is done: enough
# for uploads, commits and removals, on a machine of any speed.
_MOST_STARTS = 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Killed:
    """A start of the run that was killed, and what it left.

    Attributes:
      first_step: that it trained.
      newest: the newest committed step after the kill; 0 if there is none.
      incomplete: the committed steps that are not whole.
      leftovers: the bytes of each unfinished step.
      step_bytes: of the largest committed step.
    """

    first_step: int
    newest: int
    incomplete: tuple[int, ...]
    leftovers: tuple[int, ...]
    step_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run that was killed again and again.

    Attributes:
      kills: in order.
      failed: the output of `train` to the end, `verify` and `audit` if they fail.
    """

    kills: tuple[Killed, ...]
    failed: tuple[str, ...]

    def committed_steps_lost(self) -> int:
        """The committed steps that were missing at the next start, or after it."""
        pairs = zip(self.kills, self.kills[1:], strict=False)
        return sum(
            max(0, before.newest + 1 - after.first_step, before.newest - after.newest)
            for before, after in pairs
        )

    def leftover_ratio(self) -> float:
        """The largest leftover, over a step times the uploads since the last commit."""
        largest, uploads, newest = 0.0, 0, 0
        for each in self.kills:
            uploads = 1 if each.newest > newest else uploads + 1
            newest = each.newest
            if newest:
                parts = [part / each.step_bytes for part in each.leftovers]
                largest = max([largest, *(part / uploads for part in parts)])
        return largest


class _Run:
    def __init__(self, url: str, directory: pathlib.Path, corpus: str) -> None:
        self._config = runs.write_config(
            directory,
            corpus,
            base_output_directory=url,
            checkpoint_period=_PERIOD,
            max_num_checkpoints_to_keep=2,
            steps=1_000_000,
            log_period=1,
        )
        self._path = f"{url}/tiny"
        self._output = directory / "output"
        self._root = persistent_root.PersistentRoot.from_path(
            f"{self._path}/checkpoints"
        )

    def start_and_kill(self, starts: float) -> Killed:
        """Kills the run when it has trained for this part of the time of its start."""
        self._output.unlink(missing_ok=True)
        began = time.monotonic()
        process = runs.Started(
            "train", self._config, output=self._output, leads_group=True
        )
        # From the first start on there is a committed step that can be lost.
        while (first_step := self._first_step()) is None or not self._root.steps():
            if process.poll() is not None:
                raise RuntimeError(f"the run failed: {self._output.read_text()}")
            time.sleep(0.02)
        time.sleep(starts * (time.monotonic() - began))
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        steps = self._root.steps()
        return Killed(
            first_step=first_step,
            newest=max(steps, default=0),
            incomplete=self._incomplete() if steps else (),
            leftovers=tuple(_num_bytes(each.path) for each in self._root.leftovers()),
            step_bytes=max(
                (_num_bytes(self._root.final(step)) for step in steps), default=0
            ),
        )

    def finish(self) -> tuple[str, ...]:
        """Trains to the end, verifies and audits; returns the output of what fails."""
        newest = max(self._root.steps())
        trained = runs.cli("train", self._config, f"steps={newest + 2 * _PERIOD}")
        others = [runs.cli(verb, self._path) for verb in ("verify", "audit")]
        failed = [each for each in others if each.returncode]
        if trained.returncode or f"from step {newest} to" not in trained.stdout:
            failed.append(trained)
        return tuple(each.stdout + each.stderr for each in failed)

    def _incomplete(self) -> tuple[int, ...]:
        run = persistent_root.find_run(self._root.path)
        assert run is not None
        tier = persistent_tier.PersistentTier(self._root, run=run)
        return tuple(each.step for each in tier.held() if not each.complete)

    def _first_step(self) -> int | None:
        # None before it is done.
        if not self._output.exists():
            return None
        match = re.search(r"^step (\d+)/", self._output.read_text(), re.MULTILINE)
        return None if match is None else int(match[1])


def soak(
    url: str, directory: pathlib.Path, corpus: str, *, num_kills: int, seed: int
) -> Outcome:
    """Kills a run in a bucket again and again, and has it train to its end.

    Args:
      url: of the directory of runs.
      directory: of its configuration and output, on this machine.
      corpus: that it trains on.
      num_kills: how many.
      seed: of the moments.

    Raises:
      RuntimeError: if a start fails by itself, with its output.
      ValueError: if no step was committed.
    """
    run = _Run(url, directory, corpus)
    moments = random.Random(seed)
    kills = [
        run.start_and_kill(moments.uniform(0, _MOST_STARTS)) for _ in range(num_kills)
    ]
    return Outcome(kills=tuple(kills), failed=run.finish())


def measure(num_kills: int = _NUM_KILLS) -> dict[str, report.Figure]:
    """Runs the suite."""
    seed = random.randrange(2**16)
    print(f"seed {seed}")
    figures: dict[str, report.Figure] = {}
    with storage_buckets.stores() as environment:
        for kind, ending in (("gs", ""), ("s3", "_s3")):
            with (
                tempfile.TemporaryDirectory() as made,
                mock.patch.dict(os.environ, environment),
            ):
                directory = pathlib.Path(made)
                outcome = soak(
                    f"{kind}://{environment['BUCKET']}/soak",
                    directory,
                    corpora.write_texts(directory / "texts", num_texts=100),
                    num_kills=num_kills,
                    seed=seed,
                )
            named = _figures(outcome)
            figures |= {f"{name}{ending}": each for name, each in named.items()}
    return figures


def _figures(outcome: Outcome) -> dict[str, report.Figure]:
    kills = outcome.kills
    counts = {
        "kills": (len(kills), "no bound"),
        "committed_steps": (kills[-1].newest // _PERIOD, "no bound"),
        "committed_steps_lost": (outcome.committed_steps_lost(), "0"),
        "incomplete_steps": (sum(len(each.incomplete) for each in kills), "0"),
        "leftovers": (max(len(each.leftovers) for each in kills), "at most 2"),
        "failed": (len(outcome.failed), "0"),
    }
    figures = {
        name: report.figure(name.split("_")[-1], against, [count])
        for name, (count, against) in counts.items()
    }
    ratio = outcome.leftover_ratio()
    return figures | {"leftover_ratio": report.figure("ratio", "at most 1", [ratio])}


def _num_bytes(directory: epath.Path) -> int:
    return sum(
        _num_bytes(each) if each.is_dir() else each.stat().length
        for each in directory.iterdir()
    )
