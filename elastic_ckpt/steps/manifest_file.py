"""Manifests on disk: `manifest-<host id>.json` in a step's directory, version 1.

FORMAT.md beside this file specifies the format. A manifest is a `checked_json` file in
which every byte counts, including white space: any change is detected. Fragments are
stored as columns of numbers, because 1e6 of them in 1e4 files have to be read in
seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, checked_json, errors, storage
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragments,
    Host,
    Leaf,
    Manifest,
)
from elastic_ckpt.steps.step_id import StepId

VERSION = 1
VALUES_DIGEST = "xxh3-128"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_NAME = re.compile(rf"manifest-{_ID.pattern}\.json")
_DIGEST_BYTES = 16
# A host reads the manifests of its newest steps several times in each save; large ones
# are not kept.
_KEPT_BYTES = 2**20
# Errors that content of another kind raises when it is parsed as a manifest.
NOT_A_MANIFEST = (
    AttributeError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def file_name(host_id: str) -> str:
    """The name of a host's manifest in a step's directory."""
    return f"manifest-{host_id}.json"


def is_host_id(host_id: str) -> bool:
    """Whether a text can be the id of a host."""
    return bool(_ID.fullmatch(host_id))


def is_file_name(name: str) -> bool:
    """Whether `name` has the form of `file_name`."""
    return bool(_FILE_NAME.fullmatch(name))


def to_bytes(manifest: Manifest) -> bytes:
    """Returns the canonical content of `manifest`."""
    contents, host = manifest.contents, manifest.host
    parents = {"parents": list(map(list, contents.parents))} if contents.parents else {}
    custom = contents.custom_metadata
    fields: dict[str, storage.Json] = {
        "run": manifest.run,
        "step": manifest.step,
        "save": manifest.save,
        "host": {
            "id": host.id,
            "number": host.number,
            "domains": dict(sorted(host.domains.items())),
        },
        "leaves": [
            [each.path, list(each.shape), each.dtype] for each in contents.leaves
        ],
        "components": {
            name: {"num_parts": num_parts}
            for name, num_parts in sorted(contents.components.items())
        },
        "time_ms": contents.time_ms,
        "metrics": contents.metrics,
        **parents,
        "trees": contents.trees,
        **({} if custom is None else {"custom_metadata": custom}),
        **({"due": True} if contents.is_due else {}),
        "values_digest": VALUES_DIGEST,
        "fragments": _fragments_to_json(manifest.fragments, contents),
        "component_files": [
            {
                "component": each.component,
                "parts": list(each.parts),
                "path": each.path,
                "digest": each.digest.hex(),
                "stored_bytes": each.stored_bytes,
            }
            for each in sorted(manifest.component_files, key=lambda each: each.path)
        ],
    }
    return checked_json.to_bytes(fields, version=VERSION)


def parse(text: bytes, *, stores: bool = False) -> Manifest:
    """The manifest that `to_bytes` made into `text`, checked.

    Args:
      text: the content of its file.
      stores: whether fragments may be in key-value stores, of which a key may be
        anything, `../w/c` too. In plain files such a path would lead to other files.

    Raises:
      UnreadableError: if it is cut short, altered, of another version, or not a
        manifest.
    """
    if len(text) > _KEPT_BYTES:
        return _parsed(text, stores)
    # Offers of the same bytes are two.
    return dataclasses.replace(_kept(text, stores))


def _parsed(text: bytes, stores: bool) -> Manifest:
    content = checked_json.parse(text, what="manifest", version=VERSION, exact=True)
    try:
        return _manifest(content, stores=stores)
    except NOT_A_MANIFEST as error:
        raise checked_json.UnreadableError(f"is not a manifest ({error!r})") from None


_kept = functools.lru_cache(maxsize=16)(_parsed)


def write(step_directory: epath.PathLike, manifest: Manifest) -> None:
    """Writes `manifest`; the parts that it names have to be durable already."""
    path = epath.Path(step_directory) / file_name(manifest.host.id)
    storage.write_atomic(path, to_bytes(manifest))


def read(
    path: epath.PathLike, *, run: str, step: int, stores: bool = False
) -> Manifest:
    """The manifest of a host at `path`.

    Args:
      path: as `file_name` names it.
      run: that it has to be of.
      step: that it has to be of.
      stores: as for `parse`.

    Raises:
      LaterVersionError: if a later version of elastic_ckpt wrote it.
      CheckpointError: if it is missing, `parse` refuses it, or it is of another run,
        step or host; what it lists then does not exist.
    """
    path = os.fspath(path)
    try:
        manifest = parse(storage.read_bytes(path), stores=stores)
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
        expected = (run, step, os.path.basename(path))
        if (manifest.run, manifest.step, file_name(manifest.host.id)) == expected:
            return manifest
        problem = (
            f"is that of run {manifest.run!r}, step {manifest.step} and host"
            f" {manifest.host.id!r}, not of run {run!r}, step {step} and its own name"
        )
    raise errors.CheckpointError(
        f"manifest {path} {problem}; what it lists counts as lost: restore it from a"
        " copy, or remove it to do without"
    )


def _fragments_to_json(
    fragments: Fragments, contents: Contents
) -> dict[str, storage.Json]:
    # The bounds of all boxes in a row, of each as many numbers as its leaf has dims.
    real = contents.has_dim[fragments.leaf]
    digests = fragments.digest.tobytes().hex()
    width = 2 * _DIGEST_BYTES
    return {
        "leaf": fragments.leaf.tolist(),
        "start": fragments.boxes.start[real].tolist(),
        "stop": fragments.boxes.stop[real].tolist(),
        "digest": [digests[n : n + width] for n in range(0, len(digests), width)],
        "file": fragments.file.tolist(),
        "offset": fragments.offset.tolist(),
        "stored_bytes": fragments.stored_bytes.tolist(),
        "files": list(fragments.files),
    }


def _manifest(content: Mapping[str, Any], *, stores: bool) -> Manifest:
    host = content["host"]
    require(is_host_id(host["id"]), "the host's id")
    require(content["values_digest"] == VALUES_DIGEST, "the name of the digest")
    listed = [
        *(content[name] for name in ("leaves", "components", "time_ms", "trees")),
        *(content.get(name) for name in ("metrics", "custom_metadata")),
        content.get("parents", []),
        content.get("due", False),
    ]
    contents = _contents(storage.canonical_json(listed))
    return Manifest(
        run=str(content["run"]),
        step=int(content["step"]),
        save=str(content["save"]),
        host=Host(id=host["id"], number=host["number"], domains=host["domains"]),
        contents=contents,
        fragments=_fragments(content["fragments"], contents, stores=stores),
        component_files=tuple(
            component_file(each, contents) for each in content["component_files"]
        ),
    )


@functools.lru_cache(maxsize=64)
def _contents(listed: bytes) -> Contents:
    # All hosts of a step list the same: it is made once, and is the same object.
    leaves, components, time_ms, trees, metrics, custom, parents, due = json.loads(
        listed
    )
    made = tuple(
        Leaf(path=path, shape=tuple(shape), dtype=dtype)
        for path, shape, dtype in leaves
    )
    paths = [leaf.path for leaf in made]
    require(paths == sorted(set(paths)), "the order of the leaves")
    counts = {name: int(fields["num_parts"]) for name, fields in components.items()}
    require(isinstance(time_ms, int), "the time")
    require(metrics is None or isinstance(json.loads(metrics), dict), "the metrics")
    line = tuple(StepId(step, save) for step, save in parents)
    require(
        all(isinstance(step, int) and isinstance(save, str) for step, save in line),
        "the parents",
    )
    require(isinstance(due, bool), "whether it is due")
    for name, text in (("trees", trees), ("custom metadata", custom or "{}")):
        require(isinstance(json.loads(text), dict), f"the {name}")
    return Contents(
        leaves=made,
        components=counts,
        time_ms=time_ms,
        metrics=metrics,
        parents=line,
        trees=trees,
        custom_metadata=custom,
        is_due=due,
    )


def _fragments(
    columns: Mapping[str, Any], contents: Contents, *, stores: bool
) -> Fragments:
    leaf = np.array(columns["leaf"], np.int32)
    require(within(leaf, len(contents.leaves)), "the numbers of the leaves")
    real = contents.has_dim[leaf]
    start = np.zeros(real.shape, np.int64)
    stop = np.ones(real.shape, np.int64)
    num_bounds = (len(columns["start"]), len(columns["stop"]))
    require(num_bounds == (real.sum(),) * 2, "the number of bounds")
    start[real], stop[real] = columns["start"], columns["stop"]
    inside = (start >= 0) & (start <= stop) & (stop <= contents.shapes[leaf])
    require(bool(inside.all()), "a box inside of its leaf")
    files = tuple(columns["files"])
    file = np.array(columns["file"], np.int32)
    paths = [each.partition("//")[0] for each in files] if stores else files
    require(within(file, len(files)) and all(map(_is_below, paths)), "the files")
    digests = bytes.fromhex("".join(columns["digest"]))
    fragments = Fragments(
        leaf=leaf,
        boxes=boxes.Boxes(start=start, stop=stop),
        digest=np.frombuffer(digests, np.uint64).reshape(-1, 2),
        file=file,
        offset=np.array(columns["offset"], np.int64),
        stored_bytes=np.array(columns["stored_bytes"], np.int64),
        files=files,
    )
    lengths = {len(fragments.digest), len(file), len(fragments.offset)}
    require(
        lengths == {len(leaf)} == {len(fragments.stored_bytes)}, "columns of a length"
    )
    sizes = np.concatenate([fragments.offset, fragments.stored_bytes])
    require(bool((sizes >= 0).all()), "sizes and offsets")
    return fragments


def component_file(each: Mapping[str, Any], contents: Contents) -> ComponentFile:
    """A file of a component, of its fields in a manifest.

    Raises:
      ValueError, KeyError, TypeError: if it is not one of such a step, or leads to
        another directory.
    """
    first, end = each["parts"]
    num_parts = contents.components[each["component"]]
    require(0 <= first <= end <= num_parts, "the parts of a component")
    require(_is_below(each["path"]), "the files")
    digest = bytes.fromhex(each["digest"])
    require(len(digest) == _DIGEST_BYTES and each["stored_bytes"] >= 0, "a digest")
    return ComponentFile(
        component=each["component"],
        parts=(first, end),
        path=each["path"],
        digest=digest,
        stored_bytes=each["stored_bytes"],
    )


def within(numbers: np.ndarray, count: int) -> bool:
    """Whether all numbers are below a count, and none is negative."""
    return bool(((numbers >= 0) & (numbers < count)).all())


def _is_below(path: str) -> bool:
    # A path of a peer must not lead out of the step's directory.
    return not path.startswith("/") and ".." not in path.split("/")


def require(holds: bool, what: str) -> None:
    """Raises a ValueError that names what is wrong unless something holds."""
    if not holds:
        raise ValueError(f"{what} cannot be right")
