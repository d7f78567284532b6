"""Suite `follow`: what a follower of a run moves, and what the trainer pays for it.

A trainer of one process saves each step to RAM: weights, half of which are frozen, and
the moments of the other half. A follower in another process loads the weights of each
step from the agent. The trainer and its agent have one core and the follower another
one, if there are two, as it would be on another machine.

* `follow_bytes_over_changed`: the bytes that a follower receives from one step to the
  next, lists, manifests and headers included, over those of the weights that changed. A
  relay counts them.
* `follow_slowdown_percent`: the median step beside the follower, over that while it
  stands still. They take turns of a few steps, a sample is of many turns, and which of
  two turns is first alternates.
* `follow_lag_steps`: how many steps were complete in RAM after the one whose weights
  the follower has just loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

from benchmarks import follow_sides, relay, report
from elastic_ckpt.tiers.persistent import run_agents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    num_leaves: int = 8  # of the weights
    leaf_kib: int = 4096
    products: int = 12  # matrix products in a step
    byte_steps: int = 9  # of which the bytes are counted
    samples: int = 9  # of the slowdown
    pairs: int = 8  # of turns with and without the follower, of each sample
    turn_steps: int = 5  # the first one is not counted


# Shows that the suite runs, and measures nothing.
SMALL = Size(
    num_leaves=4,
    leaf_kib=64,
    products=1,
    byte_steps=2,
    samples=2,
    pairs=1,
    turn_steps=3,
)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite."""
    figures = {}
    with _trainer(size) as trainer:
        trainer.turn(1)
        ratios = _bytes_over_changed(trainer, size)
        figures["follow_bytes_over_changed"] = report.figure(
            "ratio", "the bytes of the weights that changed; at most 1.1", ratios
        )
        figures |= _beside(trainer, size)
    return figures


class _Trainer:
    """A process that trains and saves."""

    def __init__(self, process: subprocess.Popen[str], directory: pathlib.Path) -> None:
        self._process = process
        self.directory = directory

    @property
    def steps(self) -> pathlib.Path:
        """The directory of its steps in storage."""
        return self.directory / "steps"

    def turn(self, num_steps: int) -> list[float]:
        """Trains some steps; returns the seconds of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def _trainer(size: Size) -> Iterator[_Trainer]:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="follow-", dir="/dev/shm"))
    command = _command("trainer", directory, dataclasses.asdict(size))
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            # Leaving the block closes its standard input, which ends it.
            yield _Trainer(process, directory)
    finally:
        shutil.rmtree(directory)


def _bytes_over_changed(trainer: _Trainer, size: Size) -> list[float]:
    agents = run_agents.read(trainer.steps)
    assert agents is not None
    ((machine, url),) = agents.urls.items()
    changed_bytes = size.num_leaves // 2 * size.leaf_kib * 2**10
    with relay.Relay(url) as between:
        counted = dataclasses.replace(agents, urls={machine: between.url})
        run_agents.write(trainer.steps, counted)
        with _following(trainer) as follower:
            _loaded(follower)
            ratios = []
            for _ in range(size.byte_steps):
                before = between.num_bytes
                trainer.turn(1)
                _loaded(follower)
                ratios.append((between.num_bytes - before) / changed_bytes)
    run_agents.write(trainer.steps, agents)
    return ratios


def _beside(trainer: _Trainer, size: Size) -> dict[str, report.Figure]:
    slowdowns = []
    loaded: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _following(trainer) as follower, futures.ThreadPoolExecutor(1) as reading:
        # It begins with the step that is there.
        _loaded(follower)
        reading.submit(_read_all, follower, loaded)
        trainer.turn(size.turn_steps)
        for _ in range(size.samples):
            secs: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(size.pairs):
                for is_followed in (True, False) if pair % 2 else (False, True):
                    number = signal.SIGCONT if is_followed else signal.SIGSTOP
                    os.kill(follower.pid, number)
                    secs[is_followed] += trainer.turn(size.turn_steps)[1:]
            with_it, without = map(statistics.median, (secs[True], secs[False]))
            slowdowns.append(100 * (with_it / without - 1))
        os.kill(follower.pid, signal.SIGCONT)
        # It stood still while it loaded some of the steps so far.
        trainer.turn(1)
        _taken(loaded)
        lags = []
        for _ in range(size.byte_steps):
            trainer.turn(size.turn_steps)
            lags += _taken(loaded)
        follower.kill()
    return {
        "follow_slowdown_percent": report.figure(
            "percent", "steps while the follower stands still; at most 5", slowdowns
        ),
        "follow_lag_steps": report.figure(
            "steps", "the newest step that is complete in RAM; at most 1", lags
        ),
    }


def _taken(loaded: queue.SimpleQueue[int]) -> list[int]:
    # At least the newest step is loaded.
    lags = [loaded.get()]
    while not loaded.empty():
        lags.append(loaded.get())
    return lags


def _read_all(follower: subprocess.Popen[str], loaded: queue.SimpleQueue[int]) -> None:
    assert follower.stdout is not None
    for line in follower.stdout:
        loaded.put(json.loads(line))


@contextlib.contextmanager
def _following(trainer: _Trainer) -> Iterator[subprocess.Popen[str]]:
    command = _command("follower", trainer.directory, None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _loaded(follower: subprocess.Popen[str]) -> Any:
    assert follower.stdout is not None
    return json.loads(follower.stdout.readline())


def _command(side: str, directory: pathlib.Path, more: Any) -> Sequence[str]:
    module = follow_sides.__name__
    return [sys.executable, "-m", module, side, str(directory), json.dumps(more)]
