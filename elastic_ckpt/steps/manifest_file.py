"""Manifests of one holder as files: `manifest-<host id>` in a step's directory."""

from __future__ import annotations

import os
import re

from etils import epath

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.manifest import Manifest

_FILE_NAME = re.compile(rf"manifest-{manifest.ID.pattern}")


def file_name(host_id: str) -> str:
    """The name of a host's manifest in a step's directory."""
    return f"manifest-{host_id}"


def is_host_id(host_id: str) -> bool:
    """Whether a text can be the id of a host."""
    return bool(manifest.ID.fullmatch(host_id))


def is_file_name(name: str) -> bool:
    """Whether `name` has the form of `file_name`."""
    return bool(_FILE_NAME.fullmatch(name))


def write(step_directory: epath.PathLike, saved: Manifest) -> None:
    """Writes a manifest; the parts that it lists have to be durable already."""
    path = epath.Path(step_directory) / file_name(saved.host.id)
    storage.write_atomic(path, saved.to_bytes())


def read(path: epath.PathLike, *, run: str, step: int) -> Manifest:
    """The manifest of a host at `path`.

    Args:
      path: as `file_name` names it.
      run: that it has to be of.
      step: that it has to be of.

    Raises:
      LaterVersionError: if a later version of elastic_ckpt wrote it.
      CheckpointError: if it is missing, `parse` refuses it, or it is of another run,
        step or host; what it lists then does not exist.
    """
    path = os.fspath(path)
    try:
        saved = Manifest.parse(storage.read_bytes(path))
    except FileNotFoundError:
        problem = "is missing"
    except checked_json.LaterVersionError as error:
        raise checked_json.LaterVersionError(
            f"manifest {path} {error}, or move the directory of the step away to do"
            " without it"
        ) from None
    except checked_json.UnreadableError as error:
        problem = str(error)
    else:
        actual = (saved.run, saved.step_id.step, file_name(saved.host.id))
        if actual == (run, step, os.path.basename(path)):
            return saved
        problem = (
            f"is that of run {saved.run!r}, step {saved.step_id.step} and host"
            f" {saved.host.id!r}, not of run {run!r}, step {step} and its own name"
        )
    raise errors.CheckpointError(
        f"manifest {path} {problem}; what it lists counts as lost: restore it from a"
        " copy, or remove it to do without"
    )
