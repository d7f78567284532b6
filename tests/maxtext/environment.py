"""MaxText's environment: set up as documented, and the hosts that run in it."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess

from elastic_ckpt.core import storage

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-maxtext"
TOKENIZERS = ENVIRONMENT / "lib/python3.12/site-packages/maxtext/assets/tokenizers"
GROUP = pathlib.Path(__file__).parent / "pyproject.toml"
# The files from which it was set up last.
STAMP = ENVIRONMENT / "set_up_from"
INPUTS = (GROUP, ROOT / "constraints.txt", ROOT / "pyproject.toml")


def documented_commands():
    """The commands in the head of the dependency group."""
    head = "\n".join(
        line.removeprefix("#")
        for line in GROUP.read_text().splitlines()
        if line.startswith("#")
    )
    joined = head.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.startswith("   uv ")]


def set_up():
    """Runs the documented commands, unless that was done with the same files.

    The workers of the tests wait for each other.
    """
    with storage.exclusive_lock(f"{ENVIRONMENT}.lock", waits=True):
        _set_up()


def _set_up():
    wanted = hashlib.sha256(b"".join(map(pathlib.Path.read_bytes, INPUTS))).hexdigest()
    with contextlib.suppress(FileNotFoundError):
        if STAMP.read_text() == wanted:
            return
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    # uv itself is not on the path of everyone who runs it.
    programs = [_python_312(), os.environ.get("UV") or shutil.which("uv")]
    path = ":".join([*(os.path.dirname(program) for program in programs), os.defpath])
    for command in documented_commands():
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, command + ended.stdout + ended.stderr
    STAMP.write_text(wanted)


def _python_312():
    # A shim of pyenv may stand on the path without a Python behind it.
    candidates = [shutil.which("python3.12")]
    if shutil.which("pyenv"):
        root = subprocess.run(
            ["pyenv", "root"], capture_output=True, text=True, check=True
        ).stdout.strip()
        candidates += sorted(
            map(str, pathlib.Path(root, "versions").glob("3.12*/bin/python3.12"))
        )
    for candidate in filter(None, candidates):
        ran = subprocess.run(
            [candidate, "-c", "pass"], capture_output=True, check=False
        )
        if not ran.returncode:
            return candidate
    raise AssertionError("there is no Python 3.12, which MaxText needs")


class Hosts:
    """The server of `tests.maxtext.hosts`, in MaxText's environment."""

    def __init__(self, directory):
        self._errors = open(directory / "server.log", "w")  # noqa: SIM115
        self._server = subprocess.Popen(
            [ENVIRONMENT / "bin" / "python", "-m", "tests.maxtext.hosts"],
            cwd=ROOT,
            env={
                **os.environ,
                "DECOUPLE_GCLOUD": "TRUE",
                "JAX_PLATFORMS": "cpu",
                "PYTHONWARNINGS": "ignore",
                # Compiled as users compile: losses are compared as they are printed.
                "XLA_FLAGS": "",
            },
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


def batches(directory, *, killed=False):
    """The digests of the rows of each batch, in order, by kind of data.

    Hosts that were killed may not have come equally far.
    """
    digests = {"train": [], "eval": []}
    hosts = [path.read_text().splitlines() for path in directory.glob("*.jsonl")]
    for lines in zip(*hosts, strict=not killed):
        noted = [json.loads(line) for line in lines]
        (kind,) = {line["of"] for line in noted}
        whole: dict[str, str] = {}
        for line in noted:
            assert not whole.keys() & line["rows"].keys()
            whole |= line["rows"]
        digests[kind].append([whole[str(row)] for row in range(len(whole))])
    return digests
