"""What Hugging Face has beside weights: an index, the model's sizes, and a cache.

`model.safetensors.index.json` and `pytorch_model.bin.index.json` list the file of each
tensor. `config.json` has the sizes of the model; they are values,
`config/num_key_value_heads`.

`hf://org/name` is a model in the cache of the hub on this machine. The network is never
used: `hf download org/name` fills the cache. A folder `models--org--name` has
`refs/<revision>`, the commit of a branch or tag, and `snapshots/<commit>/`, the files.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import plain_values, source_files
from elastic_ckpt.universal.formats.format_error import FormatError

CONFIG = "config.json"
SCHEME = "hf://"
_ID = re.compile(r"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([\w-][\w.-]*(?:/[\w.-]+)*))?")
# `model-00001-of-00003.safetensors`
_SHARD = re.compile(r"(.+)-\d+-of-(\d{1,9})(\.\w+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def config_values(path: epath.Path) -> dict[str, Any]:
    """The values of a configuration, `config/...`; none if there is no such file.

    Raises:
      FormatError: if it is no JSON object.
    """
    if not path.exists():
        return {}
    return plain_values.flatten({"config": source_files.read_json(path)})


def find_index(path: epath.Path, suffix: str, usual: str) -> epath.Path | None:
    """The index of a directory, or the file that is one; None if there is none.

    Args:
      path: of a directory, or of a file.
      suffix: with which the names of indices end.
      usual: the beginning of the name of the one that is taken of several.

    Raises:
      FormatError: if there are several.
    """
    if not path.is_dir():
        return path if path.name.endswith(suffix) else None
    names = [each.name for each in path.iterdir() if each.name.endswith(suffix)]
    if len(names) > 1 and usual + suffix not in names:
        raise FormatError(
            f"{path} has several indices ({errors.first_of(sorted(names))}); give the"
            " path of one of them"
        )
    if not names:
        return None
    return path / (usual + suffix if usual + suffix in names else names[0])


def check_shards(folder: epath.Path, names: Collection[str]) -> None:
    """Checks that a directory without an index has all files of a numbered set.

    Args:
      folder: that has the files.
      names: of the files of weights.

    Raises:
      FormatError: if there are fewer than their names say.
    """
    shards = (match for name in names if (match := _SHARD.fullmatch(name)))
    held = collections.Counter(match.groups() for match in shards)
    for (stem, count, suffix), number in held.items():
        if number < int(count):
            raise FormatError(
                f"{folder} has {number} of the {int(count)} files"
                f" {stem}-*-of-{count}{suffix}, and no index of them: a conversion or"
                " a download was not finished; do it again"
            )


def read_index(index: epath.Path) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """The tensors that each file has, and the numbers and texts of an index.

    Raises:
      FormatError: if it is none, or leads to another directory.
    """
    fields = source_files.read_json(index)
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index} has no weight_map")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        held = by_file.get(file) if isinstance(file, str) else None
        if held is None:
            if not source_files.is_plain_name(file):
                shown = file[:200] if isinstance(file, str) else type(file)
                raise FormatError(
                    f"{index} lists {name[:200]} in {shown!r}, which is no file beside"
                    " it"
                )
            held = by_file[file] = []
        held.append(name)
    kept: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
    plain = {k: v for k, v in kept.items() if isinstance(v, str | int | float)}
    return dict(sorted(by_file.items())), plain


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
