"""Pages and examples whose programs are run as they are written."""

import os
import re
import runpy
import sys

from tests import runs


def blocks(page, language="python"):
    """The contents of all blocks of a language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def run(program, directory):
    """Runs a program of Python in a directory; returns what it printed."""
    path = directory / "program.py"
    path.write_text(program)
    return run_file(path, directory=directory)


def run_file(path, *arguments, directory, devices=None):
    """Runs a file as a program, in a process that has imported this package."""
    words = list(map(str, arguments))
    ended = runs.forked(_main, str(path), words, str(directory), devices)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _main(path, arguments, directory, devices):
    import jax

    if devices:
        jax.config.update("jax_num_cpu_devices", devices)
    os.chdir(directory)
    sys.path.insert(0, os.path.dirname(path))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    return 0
