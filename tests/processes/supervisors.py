"""The supervisors of a run on several machines.

Each has an address of its own, and leads a process group, which is killed or stopped as
one.
"""

import shutil
import signal
import subprocess
import time

from elastic_ckpt.core import working_directory
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps import layout
from elastic_ckpt.training import step_log
from tests import process_tree, runs
from tests.processes import great_runs

# Far more than it takes, also on a slow machine.
WAIT_SECS = 600


class Supervisors:
    """The supervisors of a run, by the numbers of their machines.

    Args:
      directory: for the run and the outputs.
      corpus: its data.
      ram: for the memory of all machines.
      machines: how many, each with one slice of one host.
      network: that they are on; by default each has an address of this machine.
      settings: of the run.
    """

    def __init__(self, directory, corpus, ram, *, machines, network=None, **settings):
        self._network = network
        self.directory, self.ram, self.run = directory, ram, directory / "tiny"
        self.config = great_runs.configured(
            directory,
            corpus,
            ram,
            hosts=machines,
            slices=machines,
            elastic_machines=machines,
            **{"elastic_machine_timeout_seconds": 20, **settings},
        )
        self.started = {}
        for number in range(machines):
            self.start(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in list(self.started):
            self.kill(number)
        # The next start on a machine removes what killed supervisors had there.
        next_start = working_directory.new_path("/dev/shm")
        working_directory.WorkingDirectory(next_start).close()

    def start(self, number):
        command = (
            *("train", self.config, f"elastic_machine={number}"),
            f"peer_interface={self._address(number)}",
        )
        if self._network is None:
            self.started[number] = runs.Started(
                *command, output=self._output(number), leads_group=True
            )
            return
        with open(self._output(number), "ab") as output:
            self.started[number] = subprocess.Popen(
                [
                    *process_tree.ENDS_WITH_PARENT,
                    *self._network.inside(number),
                    *runs.command(*command),
                ],
                cwd=runs.ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self, number):
        """Kills all processes of a machine, whose memory is lost with it."""
        machine = self.started.pop(number)
        process_tree.kill(machine)
        memory = layout.slice_directory(self.ram, number)
        shutil.rmtree(memory, ignore_errors=True)

    def freeze(self, number):
        """Stops all processes of a machine, until `wake`."""
        process_tree.send(process_tree.of(self.started[number].pid), signal.SIGSTOP)

    def wake(self, number):
        process_tree.send(process_tree.of(self.started[number].pid), signal.SIGCONT)

    def ended(self, number, *, may=()):
        """The exit code of a machine, once it has ended, and its output."""
        ends = self.started[number]
        self.wait_until(lambda: ends.poll() is not None, may=[number, *may])
        code = self.started.pop(number).returncode
        return code, self._output(number).read_text()

    def outputs(self):
        return "\n".join(
            "\n".join([f"== {path.name}", *path.read_text().splitlines()[-40:]])
            for path in sorted(self.directory.glob("machine-*.txt"))
        )

    def worlds(self):
        """The slices of each world, without those of leaders that were replaced."""
        return [each["slices"] for each in self.events("world_started")]

    def leaders(self):
        """The leaders, in turn."""
        return [each["leader"] for each in self.events("leader_found")]

    def leader(self):
        """The machine that leads."""
        return self.leaders()[-1]

    def events(self, name):
        """The events of a name; in a bucket they appear some time after the start."""
        events = run_files.read_events(str(self.run))
        return [each for each in events if each["event"] == name]

    def wait_until(self, is_so, *, may=()):
        """Waits; only machines that `may` end do so meanwhile."""
        deadline = time.monotonic() + WAIT_SECS
        while not is_so():
            assert time.monotonic() < deadline, self.outputs()
            ended = [n for n, each in self.started.items() if each.poll() is not None]
            assert set(ended) <= set(may), (ended, self.outputs())
            time.sleep(0.1)

    def train_on(self, slices, *, steps=12, may=()):
        """Waits until a world of these slices has done a number of steps."""

        def is_trained():
            # A log has a temporary name at first.
            logs = list((self.run / step_log.DIRECTORY).glob("*.jsonl"))
            if not logs or self.worlds()[-1:] != [slices]:
                return False
            last = step_log.read(self.run)[-1]
            return last.hosts == len(slices) and len(last.records) >= steps

        self.wait_until(is_trained, may=may)

    def stop(self):
        """Asks all machines to end, and waits for them."""
        for machine in self.started.values():
            machine.terminate()
        codes = {number: each.wait(WAIT_SECS) for number, each in self.started.items()}
        assert set(codes.values()) == {128 + signal.SIGTERM}, self.outputs()

    def _address(self, number):
        if self._network is None:
            return f"127.0.0.{number + 1}"
        return self._network.addresses[number]

    def _output(self, number):
        return self.directory / f"machine-{number}.txt"
