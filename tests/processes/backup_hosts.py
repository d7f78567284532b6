"""Backup hosts of a run, each a process group that can be killed."""

import os
import re
import subprocess
import time

from tests import process_tree, runs

# Far more than it takes, also on a slow machine.
WAIT_SECS = 600
_SERVING = re.compile(r"^serving \S+ at (\S+)$", re.MULTILINE)
_FETCHED = re.compile(r"^fetched step (\d+): \d+ parts, \d+ bytes$", re.MULTILINE)


class BackupHost:
    """A backup host with its RAM disk; killed at the end of the block.

    Args:
      directory: its RAM disk.
      options: of `elastic-ckpt agent`.

    Attributes:
      url: of its agent.
    """

    def __init__(self, directory, *options):
        self.directory = directory
        self._options = options
        self._output = f"{directory}.log"
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        self._start()
        self.url = self._wait(lambda: _SERVING.search(self.output()))[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def _start(self):
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(
                runs.command("agent", self.directory, *self._options),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self):
        """Kills it with its agent; the RAM disk stays."""
        process_tree.kill(self._process)

    def output(self):
        with open(self._output) as output:
            return output.read()

    def await_fetched(self, *, after):
        """Waits until it has fetched a step that is newer; returns the step."""
        return self._wait(
            lambda: max((step for step in self._fetched() if step > after), default=0)
        )

    def _fetched(self):
        return map(int, _FETCHED.findall(self.output()))

    def _wait(self, result):
        deadline = time.monotonic() + WAIT_SECS
        while not (match := result()):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        return match
