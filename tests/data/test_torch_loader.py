"""torchdata's own loader over our rows, in an environment that has PyTorch."""

import os
import subprocess
import sys
import sysconfig

import pytest

from tests import runs

# pip takes the build without CUDA.
REQUIREMENTS = ("torch==2.13.0", "torchdata==0.11.0")


@pytest.fixture(scope="module")
def python_with_torch(tmp_path_factory):
    """A Python of a new environment; all but torch it takes from this one."""
    directory = tmp_path_factory.mktemp("torch")
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    # Compiling all of PyTorch takes longer than the test, which imports little of it.
    options = ("--quiet", "--no-compile")
    install = [python, "-m", "pip", "install", *options, *REQUIREMENTS]
    subprocess.run(install, check=True, timeout=900)
    return python


@pytest.mark.night
def test_loaders_resume_where_they_were(python_with_torch):
    ours = os.pathsep.join([str(runs.ROOT), sysconfig.get_path("purelib")])
    ended = subprocess.run(
        [python_with_torch, "-m", "tests.data.stateful_loader"],
        cwd=runs.ROOT,
        env=os.environ | {"PYTHONPATH": ours},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "all are equal\n"
