"""Backup hosts of a run, each a process group that can be killed and started again."""

import os
import re
import shutil
import subprocess
import time

from tests import process_tree, runs

# Far more than it takes, also on a slow machine.
WAIT_SECS = 600
_SERVING = re.compile(r"^serving \S+ at (\S+)$", re.MULTILINE)
_FETCHED = re.compile(r"^fetched step (\d+): (\d+) parts, \d+ bytes$", re.MULTILINE)


class BackupHost:
    """A backup host with its RAM disk; killed at the end of the block.

    Args:
      directory: its RAM disk.
      options: of `elastic-ckpt agent`.

    Attributes:
      url: of its agent, also after it was started again.
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

    def _start(self, *more):
        arguments = (self.directory, *self._options, *more)
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(
                runs.command("agent", *arguments),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self):
        """Kills it with its agent; the RAM disk stays."""
        process_tree.kill(self._process)

    def start_again(self, *, is_empty=False):
        """Starts it at the same address, after its RAM disk was lost or not.

        Its output before is gone.
        """
        if is_empty:
            shutil.rmtree(self.directory)
        self._start("--port", self.url.rpartition(":")[2])

    def output(self):
        with open(self._output) as output:
            return output.read()

    def fetched(self):
        """The numbers of parts that it has fetched since it was started, by step."""
        return {int(step): int(n) for step, n in _FETCHED.findall(self.output())}

    def await_fetched(self, *, step=None, after=-1, num_parts=None):
        """Waits until it has fetched a step; returns its number, and how many parts.

        Args:
          step: the one to wait for; None for any.
          after: a step before it.
          num_parts: of the step; None for any number.
        """

        def first():
            for each, num in self.fetched().items():
                is_step = each > after if step is None else each == step
                if is_step and num_parts in (None, num):
                    return each, num
            return None

        return self._wait(first)

    def _wait(self, result):
        deadline = time.monotonic() + WAIT_SECS
        while not (match := result()):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        return match
