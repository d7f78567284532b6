"""A run of `elastic-ckpt train` that suite `recovery` disturbs from outside.

Processes of hosts are found by the logs that they write to, and get real signals. The
figures of a change come from the run's own events (`events.jsonl`) and metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.elastic import scale_request
from elastic_ckpt.inspect import run_files

Event = dict[str, Any]

# Between two looks at the events.
_LOOK_SECS = 0.02
# For what a run does next, on a machine that is ten times slower.
_PATIENCE_SECS = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change of slices; times are seconds since the epoch."""

    began: float  # when a host was killed
    recovered: Event  # of that name, after the first step of the next world

    @property
    def secs(self) -> float:
        """From the fault to the first step of the next world."""
        return self.recovered["time"] - self.began

    @property
    def detect_secs(self) -> float:
        """From the fault until the supervisor has noticed it."""
        return self.secs - self.recovered["secs"]


class LiveRun:
    """A run that trains in another process, with its files in a new directory."""

    def __init__(self, settings: Mapping[str, Any], directory: pathlib.Path) -> None:
        directory.mkdir(parents=True)
        values = {
            "run_name": "run",
            "base_output_directory": str(directory),
            # Until it is stopped.
            "steps": 10**6,
            **settings,
        }
        config = directory / "config.yml"
        # JSON is YAML.
        config.write_text(json.dumps(values))
        self.directory = directory / "run"
        self._output = directory / "output.txt"
        self._position = 0
        self.events: list[Event] = []
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elastic_ckpt.cli.main", "train", str(config)],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, name: str, *, after: int = 0) -> Event:
        """The first event of a name that is not among the first `after` events.

        Raises:
          RuntimeError: if it does not come, with the end of the output.
        """
        until = time.monotonic() + _PATIENCE_SECS
        while True:
            self._read()
            for event in self.events[after:]:
                if event["event"] == name:
                    return event
            if self._process.poll() is not None or time.monotonic() > until:
                shown = self._output.read_text()[-3000:]
                raise RuntimeError(f"the run has no event {name!r}:\n{shown}")
            time.sleep(_LOOK_SECS)

    def disturb(self, host: int, number: signal.Signals) -> Change:
        """Sends a signal to a host, and returns when the next world has recovered."""
        self._read()
        after = len(self.events)
        began = time.time()
        os.kill(self._hosts()[host], number)
        return Change(began=began, recovered=self.wait_for("recovered", after=after))

    def scale(self, slices: int) -> Event:
        """Requests a number of slices.

        Returns:
          The event `world_started` of the next world, when that has recovered.
        """
        self._read()
        after = len(self.events)
        scale_request.write(self.directory, slices)
        started = self.wait_for("world_started", after=after)
        self.wait_for("recovered", after=after)
        return started

    def named(self, name: str) -> list[Event]:
        """The events of a name so far."""
        self._read()
        return [event for event in self.events if event["event"] == name]

    def step_times(self) -> list[tuple[float, int]]:
        """The time of each step, and the steps done, in the order of time.

        The run must have ended.
        """
        recorded = run_files.read_metrics(self.directory / "metrics")["run"]
        name = "/elastic_ckpt/train/steps"
        return [(r["time"], int(r["last"])) for r in recorded if r["metric"] == name]

    def stop(self) -> None:
        """Ends the run by SIGTERM, and returns when it has ended."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_SECS)
        finally:
            self._process.kill()
            self._process.wait()
        self._read()

    def _read(self) -> None:
        path = self.directory / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._position)
            *lines, _ = file.read().split(b"\n")
        self._position += sum(len(line) + 1 for line in lines)
        self.events += map(json.loads, lines)

    def _hosts(self) -> dict[int, int]:
        # The process of each host, by its number, of the world that runs: the oldest.
        worlds: dict[str, dict[int, int]] = {}
        logs = self.directory / "logs"
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                log = pathlib.Path(os.readlink(entry / "fd" / "1"))
                if log.parent.parent == logs and log.stem.startswith("host-"):
                    host = int(log.stem.removeprefix("host-"))
                    worlds.setdefault(log.parent.name, {})[host] = int(entry.name)
        return worlds[min(worlds)]


@contextlib.contextmanager
def live(settings: Mapping[str, Any], directory: pathlib.Path) -> Iterator[LiveRun]:
    """A `LiveRun` that is stopped at the end of the block."""
    run = LiveRun(settings, directory)
    try:
        yield run
    finally:
        run.stop()


def pause_secs(step_times: Sequence[tuple[float, int]], started: Event) -> float:
    """How long no step was done before and after an event `world_started`."""
    last = max(time for time, _ in step_times if time <= started["time"])
    return min(time for time, _ in step_times if time > started["time"]) - last
