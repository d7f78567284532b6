"""MaxText's environment: set up as documented, and the hosts that run in it."""

import json
import os
import pathlib
import re
import subprocess

from tests.environments import ROOT, Environment

ENVIRONMENT = ROOT / ".venv-maxtext"
TOKENIZERS = ENVIRONMENT / "lib/python3.12/site-packages/maxtext/assets/tokenizers"
GROUP = pathlib.Path(__file__).parent / "pyproject.toml"
_MAXTEXT = Environment(ENVIRONMENT, GROUP, "3.12")
documented_commands = _MAXTEXT.documented_commands
set_up = _MAXTEXT.set_up
run = _MAXTEXT.run


def variables():
    """The variables of programs in the environment."""
    return {
        **os.environ,
        "DECOUPLE_GCLOUD": "TRUE",
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
        # Compiled as users compile: losses are compared as they are printed.
        "XLA_FLAGS": "",
    }


def machine_keys(number):
    """The arguments that tell one of the machines, simulated on this one, its place."""
    return [f"elastic_machine={number}", f"peer_interface=127.0.0.{number + 1}"]


class Hosts:
    """The server of `tests.maxtext.hosts`, in MaxText's environment.

    Args:
      directory: of its log.
    """

    def __init__(self, directory):
        self._errors = open(directory / "server.log", "w")  # noqa: SIM115
        self._server = subprocess.Popen(
            [ENVIRONMENT / "bin" / "python", "-m", "tests.maxtext.hosts"],
            cwd=ROOT,
            env=variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, *, directory, **run):
        """Runs MaxText on some hosts, as a `hosts.Run` says; their exit codes."""
        line = {"directory": str(directory), **run}
        self._server.stdin.write(json.dumps(line) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self):
        """Ends the server."""
        self._server.stdin.close()
        assert self._server.wait() == 0
        self._server.stdout.close()
        self._errors.close()


_TRAINED = re.compile(
    r"completed step: (\d+), .*total_weights: (\S+), loss: (\S+), lm_loss: (\S+),"
)
_EVALUATED = re.compile(
    r"Completed eval after train step (\d+), loss=(\S+), .*total_weights=(\S+),"
)


def losses(directory):
    """The losses that host 0 printed of each step and evaluation, as text."""
    log = (directory / "0.log").read_text()
    trained, evaluated = (
        {int(step): values for step, *values in pattern.findall(log)}
        for pattern in (_TRAINED, _EVALUATED)
    )
    return {"train": trained, "eval": evaluated}


def batches(directory):
    """The digests of the rows of each batch, in order, by kind of data."""
    digests = {"train": [], "eval": []}
    hosts = [path.read_text().splitlines() for path in directory.glob("*.jsonl")]
    for lines in zip(*hosts, strict=True):
        noted = [json.loads(line) for line in lines]
        (kind,) = {line["of"] for line in noted}
        whole: dict[str, str] = {}
        for line in noted:
            assert not whole.keys() & line["rows"].keys()
            whole |= line["rows"]
        digests[kind].append([whole[str(row)] for row in range(len(whole))])
    return digests
