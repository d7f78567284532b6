"""Backup hosts of a run, each a process group that can be killed."""

import os
import re
import socket
import subprocess
import time

from elastic_ckpt.tiers.ram.ram_disk import RamDisk
from tests import process_tree, runs

# Far more than it takes, also on a slow machine.
WAIT_SECS = 600
_COPIED = re.compile(r"^copied \d+ parts, \d+ bytes, of step (\d+)$", re.MULTILINE)


class BackupHost:
    """The only backup host of a run; killed at the end of the block.

    Args:
      directory: its RAM disk.
      steps: of the run, in storage.
      secret_file: of the run.

    Attributes:
      url: of its agent.
    """

    def __init__(self, directory, *, steps, secret_file):
        self.directory = directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        name = os.path.basename(directory)
        self.url = f"http://127.0.0.1:{port}/v1/{name}"
        self._options = ["--port", port, "--backup", self.url]
        self._options += ["--follow", steps, "--secret-file", secret_file]
        self._output = f"{directory}.log"
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        self._start()
        self._wait(lambda: self.url in self.output())

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

    def await_copied(self, *, after):
        """Waits until it has copied a step that is newer; returns the step."""
        return self._wait(
            lambda: max((step for step in self._copied() if step > after), default=0)
        )

    def newest(self):
        """The newest step of which it holds anything."""
        return max(RamDisk(self.directory, run="tiny").known_saves()).step

    def _copied(self):
        return map(int, _COPIED.findall(self.output()))

    def _wait(self, result):
        deadline = time.monotonic() + WAIT_SECS
        while not (match := result()):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        return match
