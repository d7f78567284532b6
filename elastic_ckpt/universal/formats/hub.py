"""Finds models of the Hugging Face hub in its cache on this machine: `hf://org/name`.

The network is never used: `hf download org/name` fills the cache. A folder
`models--org--name` has `refs/<revision>`, the commit of a branch or tag, and
`snapshots/<commit>/`, the files.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping

from elastic_ckpt.universal.formats import source_files
from elastic_ckpt.universal.formats.format_error import FormatError

SCHEME = "hf://"
_ID = re.compile(r"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([\w-][\w.-]*(?:/[\w.-]+)*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_id(path: str) -> bool:
    """Whether a path is the id of a model."""
    return path.startswith(SCHEME)


def snapshot(path: str, environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """The directory of a model's files.

    Args:
      path: `hf://org/name`, or `hf://org/name@revision` with a branch, a tag or a
        commit; without it the branch `main`.
      environ: the variables of the environment, of which `HF_HUB_CACHE` or `HF_HOME`
        lead to the cache.

    Raises:
      FormatError: if it is no such id, or the cache does not have it.
    """
    match = _ID.fullmatch(path.removeprefix(SCHEME))
    if match is None or ".." in path:
        raise FormatError(
            f"{path} is no id of a model; it is hf://org/name or hf://org/name@revision"
        )
    name, revision = match[1], match[2] or "main"
    folder = _cache(environ) / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / revision
    commit = revision
    if reference.is_file():
        content = source_files.read(reference, most_bytes=source_files.MOST_NAME_BYTES)
        commit = content.decode("utf-8", "replace").strip()
    found = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not found.is_dir():
        of_revision = f" --revision {revision}" if match[2] else ""
        raise FormatError(
            f"{path} is not in the cache of the hub ({folder}), and it is never"
            f" downloaded here: run `hf download {name}{of_revision}`, or set HF_HOME"
            " or HF_HUB_CACHE to the cache that has it"
        )
    return found


def _cache(environ: Mapping[str, str]) -> pathlib.Path:
    # As huggingface_hub finds it.
    if path := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return pathlib.Path(path).expanduser()
    home = environ.get("HF_HOME") or os.path.join(
        environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return pathlib.Path(home).expanduser() / "hub"
