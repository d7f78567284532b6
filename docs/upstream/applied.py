"""Copies of installed packages to which a patch beside this file is applied."""

import importlib
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def patched(directory: pathlib.Path, package: str, patch: str) -> dict[str, str]:
    """The environment of programs that import a package with the patch.

    Args:
      directory: empty, for the copy.
      package: such as `orbax.checkpoint`.
      patch: the name of a file beside this one.
    """
    (installed,) = importlib.import_module(package).__path__
    copy = directory.joinpath(*package.split("."))
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # Below a repository, git would look for the files of that one.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.parent)}
    subprocess.run(
        ["git", "apply", "-p1", str(HERE / patch)],
        cwd=directory,
        env=environment,
        check=True,
    )
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), *sys.path[1:]])}
