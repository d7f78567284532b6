"""Environments of other programs, each set up as the head of its group documents."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess

from elastic_ckpt.core import storage

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment beside the project's own.

    Attributes:
      directory: where it is set up.
      group: the file with its dependency group, and in its head the commands.
      python: the version of Python that it needs, as "3.12".
    """

    directory: pathlib.Path
    group: pathlib.Path
    python: str

    def documented_commands(self):
        """The commands in the head of the dependency group."""
        head = "\n".join(
            line.removeprefix("#")
            for line in self.group.read_text().splitlines()
            if line.startswith("#")
        )
        joined = head.replace("\\\n", " ")
        return [line.strip() for line in joined.splitlines() if line.startswith("   ")]

    def set_up(self):
        """Runs the documented commands, unless that was done with the same files.

        The workers of the tests wait for each other.
        """
        with storage.exclusive_lock(f"{self.directory}.lock", waits=True):
            self._set_up()

    def run(self, module, *arguments):
        """Runs a module of the tests in it."""
        ended = subprocess.run(
            [self.directory / "bin/python", "-m", module, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-5000:]

    def _set_up(self):
        inputs = (self.group, ROOT / "constraints.txt", ROOT / "pyproject.toml")
        texts = b"".join(map(pathlib.Path.read_bytes, inputs))
        wanted = hashlib.sha256(texts).hexdigest()
        stamp = self.directory / "set_up_from"
        with contextlib.suppress(FileNotFoundError):
            if stamp.read_text() == wanted:
                return
        shutil.rmtree(self.directory, ignore_errors=True)
        # uv itself is not on the path of everyone who runs it.
        programs = [_python(self.python), os.environ.get("UV") or shutil.which("uv")]
        path = ":".join([*(os.path.dirname(each) for each in programs), os.defpath])
        for command in self.documented_commands():
            ended = subprocess.run(
                ["bash", "-c", command],
                cwd=ROOT,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, command + ended.stdout + ended.stderr
        stamp.write_text(wanted)


def _python(version):
    # A shim of pyenv may stand on the path without a Python behind it.
    candidates = [shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        root = subprocess.run(
            ["pyenv", "root"], capture_output=True, text=True, check=True
        ).stdout.strip()
        pattern = f"{version}*/bin/python{version}"
        candidates += sorted(map(str, pathlib.Path(root, "versions").glob(pattern)))
    for candidate in filter(None, candidates):
        ran = subprocess.run(
            [candidate, "-c", "pass"], capture_output=True, check=False
        )
        if not ran.returncode:
            return candidate
    raise AssertionError(f"there is no Python {version}, which these tests need")
