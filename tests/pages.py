"""Pages whose blocks are run as they are written."""

import re
import subprocess
import sys


def blocks(page, language="python"):
    """The contents of all blocks of a language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def run(program, directory):
    """Runs a program of Python in a directory; returns what it printed."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
