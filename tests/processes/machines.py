"""Machines: directories in /dev/shm, each with its own agent, that can be lost.

A world of n hosts runs on the first n machines that are left. The steps of a host stay
in its machine's directory when its process is gone, as on a real machine.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys

from elastic_ckpt.tiers.ram import machine
from tests import shared_memory


class Machines:
    """Some machines; at the end of the block nothing of them is left."""

    def __init__(self):
        self._directory = shared_memory.directory("machines")
        self._agents = {}
        self._lost = 0

    def __enter__(self):
        self.root = self._directory.__enter__()
        return self

    def __exit__(self, *error):
        for number in list(self._agents):
            self.stop_agent(number)
        self._directory.__exit__(*error)

    def directory(self, number):
        """The RAM disk of a machine."""
        return os.path.join(self.root, f"machine-{number}")

    def start_agents(self, numbers):
        """Starts the agents of some machines, unless they run."""
        for number in numbers:
            if number not in self._agents:
                self._begin(number)
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "elastic_ckpt.cli.main", "agent"),
                        self.directory(number),
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert process.stdout.readline().startswith("serving")
                self._agents[number] = process

    def stop_agent(self, number):
        """Kills the agent of a machine."""
        process = self._agents.pop(number, None)
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()

    def lose(self, number):
        """Takes a machine away, with all that its memory holds."""
        self.stop_agent(number)
        self._lost += 1
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory(number))

    def _begin(self, number):
        # An id that is chosen, not drawn: placement is the same in every run of a test.
        file = pathlib.Path(self.directory(number), machine.FILE)
        if not file.exists():
            file.parent.mkdir()
            file.write_text(f"{number:08x}{self._lost:08x}")
