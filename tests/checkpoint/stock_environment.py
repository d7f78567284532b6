"""An environment with JAX and Orbax, and nothing of ours."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-stock-orbax"
CONSTRAINTS = ROOT / "constraints.txt"
WANTED = ("-c", CONSTRAINTS, "jax", "orbax-checkpoint")
PROGRAM = pathlib.Path(__file__).parent / "stock_program.py"


def set_up():
    """Makes the environment, unless that was done with the same constraints."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = hashlib.sha256(version.encode() + CONSTRAINTS.read_bytes()).hexdigest()
    stamp = ENVIRONMENT / "set_up_from"
    with contextlib.suppress(FileNotFoundError):
        if stamp.read_text() == wanted:
            return
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    uv = os.environ.get("UV") or shutil.which("uv")
    python = ENVIRONMENT / "bin" / "python"
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, ENVIRONMENT],
        [uv, "pip", "install", "--quiet", "--python", python, *WANTED],
    ):
        subprocess.run(command, cwd=ROOT, check=True)
    stamp.write_text(wanted)


def load(root, kind, *, devices, shape, directory):
    """Runs the program, which loads the steps below `root` on a mesh of devices."""
    ran = subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-I", PROGRAM, root, kind]
        + [str(number) for number in (devices, *shape)],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
