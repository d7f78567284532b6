"""Programs that run with a patched package."""

import os
import pathlib
import runpy
import subprocess
import sys

PAGES = pathlib.Path(__file__).parents[2] / "docs/upstream"


def patched(directory, package, patch):
    """See `patched` in docs/upstream/applied.py."""
    return runpy.run_path(str(PAGES / "applied.py"))["patched"](
        directory, package, patch
    )


def ran(words, environment):
    """What a Python program prints, which must not fail."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
