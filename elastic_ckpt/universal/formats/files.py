"""Opens files in other frameworks' checkpoints and reads them whole or in parts.

A local file must be regular, because reading from a pipe might block forever. JSON
objects must not repeat a name.

`hf://org/name` is a model in this machine's Hugging Face cache, which `hf download
org/name` fills; the network is never used. A folder `models--org--name` in the cache
has `refs/<revision>`, the commit of a branch or tag, and `snapshots/<commit>/`, the
files.
"""

from __future__ import annotations

import bisect
import json
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, TypeGuard

from etils import epath

from elastic_ckpt.core import bucket_clients, errors, storage

SCHEME = "hf://"
# Maximum size of a file that contains the name of another file.
MOST_NAME_BYTES = 1000
# Reading this many bytes costs less than a second request.
GAP_BYTES = 64 << 10
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ID = re.compile(r"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([\w-][\w.-]*(?:/[\w.-]+)*))?")


class FormatError(errors.CheckpointError):
    """A file from another framework is damaged, unsafe, or in an unknown format."""


def opened(path: epath.PathLike) -> IO[bytes]:
    """Opens a file for reading, local or in a bucket; links are followed.

    Raises:
      FormatError: if the file is missing or not regular.
    """
    try:
        if storage.is_local(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(
                f"{path} is not a regular file; copy the whole checkpoint again"
            )
        return epath.Path(path).open("rb")
    except (FileNotFoundError, IsADirectoryError):
        raise FormatError(
            f"{path} is missing; copy the whole checkpoint again"
        ) from None


def read(path: epath.PathLike, *, most_bytes: int | None = None) -> bytes:
    """Reads a whole file.

    Raises:
      FormatError: if the file is missing or is larger than `most_bytes`.
    """
    with opened(path) as file:
        num_bytes = file.seek(0, 2)
        if most_bytes is not None and num_bytes > most_bytes:
            raise FormatError(
                f"{path} has {num_bytes} bytes, but at most {most_bytes} are supported"
            )
        file.seek(0)
        return file.read(num_bytes)


def read_name(path: epath.PathLike) -> str:
    """Reads a file that contains only the name of another file or directory.

    Raises:
      FormatError: if the file is missing or is too large for a name.
    """
    return read(path, most_bytes=MOST_NAME_BYTES).decode("utf-8", "replace").strip()


def is_plain_name(name: object) -> TypeGuard[str]:
    """Whether a value is a file name that does not lead to another directory."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def read_json(path: epath.PathLike) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
      FormatError: if the file is missing; see also `parse_json`.
    """
    return parse_json(read(path), str(path))


def parse_json(content: bytes, place: str) -> dict[str, Any]:
    """Parses a JSON object in UTF-8; `place` is used in error messages.

    Raises:
      FormatError: if the content is not a JSON object or repeats a name.
    """
    try:
        fields = json.loads(content, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place} is not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise FormatError(f"{place} is not a JSON object")
    return fields


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("it repeats a name")
    return fields


def windows(path: str, spans: Iterable[tuple[int, int]]) -> Callable[[int, int], bytes]:
    """Reads many small parts of a file and returns a function that looks them up.

    In checkpoints with a header for each tensor, a few hundred bytes are needed at many
    places. Nearby parts are read together; parts of a file in a bucket are read by
    parallel requests.

    Args:
      path: the file, local or in a bucket.
      spans: the start and end offset (exclusive) of each part.

    Returns:
      A function that takes an offset in one of the parts and a number of bytes, and
      returns the bytes there, or fewer if the part ends early.
    """
    merged = merged_spans(spans, gap_bytes=GAP_BYTES)
    starts, stops = [start for start, _ in merged], [stop for _, stop in merged]
    parts = _read_parts(path, starts, stops)

    def read_at(start: int, size: int) -> bytes:
        number = bisect.bisect_right(starts, start) - 1
        at = start - starts[number]
        return parts[number][at : at + size]

    return read_at


def merged_spans(
    spans: Iterable[tuple[int, int]], *, gap_bytes: int = 0
) -> list[tuple[int, int]]:
    """Sorts byte ranges and joins neighbors with gaps of at most `gap_bytes`."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start - merged[-1][1] <= gap_bytes:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _read_parts(path: str, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
    if storage.is_local(path):
        with opened(path) as file:
            spans = zip(starts, stops, strict=True)
            return [
                os.pread(file.fileno(), stop - start, start) for start, stop in spans
            ]
    system, name = bucket_clients.opened(path)
    return list(
        system.cat_ranges([name] * len(starts), starts, stops, on_error="raise")
    )


def resolved(path: epath.PathLike) -> epath.PathLike:
    """Resolves a model ID to its path in the hub's cache; returns other paths as is.

    Args:
      path: a path, `hf://org/name`, or `hf://org/name@revision` with a branch, a tag or
        a commit (default: the branch `main`). `HF_HUB_CACHE` or `HF_HOME` sets the
        location of the cache.

    Raises:
      FormatError: if the model ID is malformed or the cache does not have the model.
    """
    text = str(path)
    if not text.startswith(SCHEME):
        return path
    match = _ID.fullmatch(text.removeprefix(SCHEME))
    if match is None or ".." in text:
        raise FormatError(
            f"{text} is not a model ID; use hf://org/name or hf://org/name@revision"
        )
    name, revision = match[1], match[2] or "main"
    folder = _cache() / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / revision
    commit = read_name(reference) if reference.is_file() else revision
    found = folder / "snapshots" / commit
    if not is_plain_name(commit) or not found.is_dir():
        of_revision = f" --revision {revision}" if match[2] else ""
        raise FormatError(
            f"{text} is not in the hub's cache ({folder}), and elastic_ckpt never"
            f" downloads models; run `hf download {name}{of_revision}`, or set HF_HOME"
            " or HF_HUB_CACHE to the cache that has this model"
        )
    return found


def _cache() -> pathlib.Path:
    # Looks in the same places as huggingface_hub.
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return pathlib.Path(hub).expanduser()
