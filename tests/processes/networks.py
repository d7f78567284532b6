"""A network of machines that can be cut: a network namespace for each, and bridges.

The namespaces belong to a user namespace, so that no privilege is needed where the
kernel lets users make one. Processes of different machines reach each other by their
addresses alone; files are shared by all.
"""

import contextlib
import subprocess

import pytest


class Network:
    """Some machines on one network; at the end of the block nothing of it is left.

    Attributes:
      addresses: of each machine.
    """

    def __init__(self, machines):
        self.addresses = [f"10.0.0.{number + 1}" for number in range(machines)]
        self._resources = contextlib.ExitStack()

    def __enter__(self):
        try:
            self._switch = self._hold("unshare", "--user", "--map-root-user", "--net")
            inside = self._inside(self._switch)
            self._machines = [
                self._hold(*inside, "unshare", "--net") for _ in self.addresses
            ]
            for number, address in enumerate(self.addresses):
                self._connect(number, address)
            self.join([range(len(self.addresses))])
        except (OSError, subprocess.CalledProcessError) as error:
            self._resources.close()
            why = getattr(error, "stderr", None) or error
            pytest.skip(f"networks cannot be made here: {why}")
        return self

    def __exit__(self, *_):
        self._resources.close()

    def inside(self, number):
        """The beginning of a command line that runs on a machine."""
        return self._inside(self._machines[number])

    def join(self, parts):
        """Connects the machines of each part, and disconnects the parts.

        Packets between two parts are lost without an error.

        Args:
          parts: the numbers of the machines of each part.
        """
        for part in parts:
            bridge = f"part{part[0]}"
            for number in part:
                self._ip(self._switch, f"link set port{number} master {bridge}")

    def _connect(self, number, address):
        machine = self._machines[number]
        self._ip(self._switch, f"link add part{number} type bridge")
        self._ip(self._switch, f"link set part{number} up")
        self._ip(
            self._switch,
            f"link add port{number} type veth peer name wire netns {machine}",
        )
        self._ip(self._switch, f"link set port{number} up")
        self._ip(machine, f"address add {address}/24 dev wire")
        self._ip(machine, "link set wire up")
        self._ip(machine, "link set lo up")

    def _ip(self, namespace, arguments):
        subprocess.run(
            [*self._inside(namespace), "ip", *arguments.split()],
            check=True,
            capture_output=True,
            text=True,
        )

    def _inside(self, namespace):
        return (
            *("nsenter", "--target", str(namespace), "--user", "--net"),
            "--preserve-credentials",
        )

    def _hold(self, *command):
        # A process that keeps a namespace until its input is closed.
        holder = self._resources.enter_context(
            subprocess.Popen(
                [*command, "sh", "-c", "echo; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        self._resources.callback(holder.stdin.close)
        if not holder.stdout.readline():
            raise OSError(holder.stderr.read())
        return holder.pid
