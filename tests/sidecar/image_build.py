"""The stages of the Dockerfile, built without a container runtime.

The steps of a stage run in a directory that stands for its file system, with an
environment of the Python that the base image's tag names. It differs from a real build:
uv installs the head too, and the base image is reduced to its Python and a constraint
on JAX. So nothing is shown of the libraries of the system, of the sidecar's server, its
entry point and its other packages, of its jaxlib, whose client for colocated Python the
public one lacks (the build of the image looks for it), of the accelerator's JAX, and of
the network between pods.
"""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
DOCKERFILE = ROOT / "sidecar" / "Dockerfile"
# In the jaxlib of the base image alone.
BASE_CLIENT = "colocated_python_cpu_client"
_VERSIONS = (
    "import json, platform; from importlib import metadata;"
    "installed = {each.name: each.version for each in metadata.distributions()};"
    "print(json.dumps({**installed, 'python': platform.python_version()}))"
)


@dataclasses.dataclass
class Stage:
    """A stage: its base image, and its steps as instructions with their arguments."""

    base: str
    steps: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    @property
    def python(self) -> str:
        """The version of Python that the tag of the base names."""
        (version,) = re.findall(r"(?:python:|python_)(\d+\.\d+)", self.base)
        return version

    @property
    def jax(self) -> list[str]:
        """The version of JAX that the tag of the base names, if it does."""
        return re.findall(r"-jax_([\d.]+)$", self.base)


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile, by name."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M)
    parsed: dict[str, Stage] = {}
    for line in filter(None, re.sub(r"\\\n\s*", "", text).splitlines()):
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            base, _, name = argument.partition(" AS ")
            parsed[name] = stage = Stage(base)
        else:
            stage.steps.append((instruction, argument))
    return parsed


class Image:
    """The files and the environment that the steps of a stage make.

    Args:
      stage: of the Dockerfile.
      directory: stands for the file system; not there yet.

    Attributes:
      environ: the environment of programs.
      left_out: the commands that only the real base image can run.
    """

    def __init__(self, stage: Stage, directory: pathlib.Path) -> None:
        self._files = self._place = directory
        self._environment = directory / "opt" / "venv"
        self.environ = {
            **os.environ,
            "PATH": f"{self._environment}/bin:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self._environment),
            # pyproject.toml has the constraints of the tests for uv.
            "UV_NO_CONFIG": "1",
        }
        self.left_out: list[str] = []
        self._command: list[str] = []
        directory.mkdir(parents=True)
        self.run(["uv", "venv", "--quiet", "--python", _python(stage.python),
                  self._environment])  # fmt: skip
        constraints = [
            f"{each}=={v}\n" for v in stage.jax for each in ("jax", "jaxlib")
        ]
        path = self._environment / "server_constraints.txt"
        path.write_text("".join(constraints))
        steps = {
            "ARG": self._argument,
            "CMD": self._default_command,
            "COPY": self._copy,
            "RUN": self._run,
            "WORKDIR": self._go_to,
        }
        for instruction, argument in stage.steps:
            steps[instruction](argument)

    @property
    def python(self) -> str:
        """The path of its Python."""
        return str(self._environment / "bin" / "python")

    def default(self) -> str:
        """The output of the command that a container runs."""
        return self.run(self._command)

    def versions(self) -> dict[str, str]:
        """The versions of its distributions, by name, and of its Python."""
        return json.loads(self.run([self.python, "-c", _VERSIONS]))

    def run(self, command: list[object], **options: object) -> str:
        """The output of a command in the image, which must succeed."""
        ended = subprocess.run(
            list(map(str, command)),
            **{"cwd": self._place, "env": self.environ, **options},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def _argument(self, argument: str) -> None:
        (assignment,) = shlex.split(argument)
        name, _, value = assignment.partition("=")
        self.environ[name] = value

    def _default_command(self, argument: str) -> None:
        self._command = json.loads(argument)

    def _go_to(self, argument: str) -> None:
        self._place = self._path(argument)
        self._place.mkdir(parents=True, exist_ok=True)

    def _copy(self, argument: str) -> None:
        *sources, target = argument.split()
        for source in sources:
            path, copy = ROOT / source, self._path(target)
            if path.is_dir():
                # Docker copies the entries of a directory.
                shutil.copytree(path, copy, dirs_exist_ok=True)
                continue
            if target.endswith("/"):
                copy /= path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)

    def _run(self, argument: str) -> None:
        for command in argument.split(" && "):
            if BASE_CLIENT in command:
                self.left_out.append(command)
                continue
            command = re.sub(r" --no-cache(-dir)?\b", "", command)
            command = re.sub(r"\b(uv )?pip install", "uv pip install --quiet", command)
            self.run(["sh", "-ec", re.sub(r"(?<= )/", f"{self._files}/", command)])

    def _path(self, path: str) -> pathlib.Path:
        if path.startswith("/"):
            return self._files / path.removeprefix("/")
        return self._place / path


def _python(version: str) -> str:
    # One beside this Python, as pyenv and uv have them; or else any that uv finds.
    others = pathlib.Path(sys.base_prefix).parent.glob(f"*{version}.*/bin/python3")
    return next(map(str, sorted(others)), version)
