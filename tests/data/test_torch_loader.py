"""torchdata's own loader over our rows, in an environment that has PyTorch."""

import os
import subprocess
import sys
import sysconfig

import pytest

from tests import runs

# pip takes the build without CUDA.
REQUIREMENTS = ("torch==2.13.0", "torchdata==0.11.0")


@pytest.mark.night
def test_loaders_resume_where_they_were(tmp_path):
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    # Compiling all of PyTorch takes longer than the test, which imports little of it.
    options = ("--quiet", "--no-compile")
    install = [python, "-m", "pip", "install", *options, *REQUIREMENTS]
    subprocess.run(install, check=True, timeout=900)
    # All but torch it takes from this environment.
    ours = os.pathsep.join([str(runs.ROOT), sysconfig.get_path("purelib")])
    ended = subprocess.run(
        [python, "-m", "tests.data.stateful_loader"],
        cwd=runs.ROOT,
        env=os.environ | {"PYTHONPATH": ours},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "all are equal\n"
