"""The parts of an upload that are in storage so far, for hosts that continue it.

    <unfinished>/progress-<host id>.json

has the content of a manifest. A host writes it while it uploads, and its manifest when
it has finished; readers of checkpoints ignore it, and a commit removes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from etils import epath

from elastic_ckpt.core import boxes, checked_json, storage
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Manifest,
)
from elastic_ckpt.steps.step_id import StepId

Listed = Fragment | ComponentFile
# A part of a step, wherever it lies: the leaf, box and digest of a fragment, or a file.
Part = tuple[int, object, bytes] | ComponentFile
# What one part alone can be at: a leaf and a box, or the path of a file.
Place = tuple[int, boxes.Box] | str
_PREFIX = "progress-"


def file_name(host_id: str) -> str:
    """The name of the file of a host."""
    return f"{_PREFIX}{host_id}.json"


def write(directory: epath.Path, manifest: Manifest) -> None:
    """Writes what a host has uploaded so far; the parts have to be durable already."""
    path = directory / file_name(manifest.host.id)
    storage.write_atomic(path, manifest_file.to_bytes(manifest))


def read(
    directory: epath.Path, *, run: str, step_id: StepId, contents: Contents
) -> list[Manifest]:
    """Reads what hosts have written of an upload; finished manifests come first.

    Raises:
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    if not directory.exists():
        return []
    uploads = []
    for name in sorted(storage.names(directory)):
        if not (name.startswith(_PREFIX) or manifest_file.is_file_name(name)):
            continue
        try:
            content = (directory / name).read_bytes()
            manifest = manifest_file.parse(content, stores=True)
        except (FileNotFoundError, checked_json.UnreadableError):
            continue
        identity = (manifest.run, manifest.step_id)
        if identity == (run, step_id) and manifest.contents == contents:
            uploads.append(manifest)
    return uploads


def listed(manifest: Manifest) -> list[Listed]:
    """The fragments and files of a manifest."""
    return [*manifest.rows, *manifest.component_files]


def listing(manifest: Manifest, parts: Collection[Listed]) -> Manifest:
    """A manifest of the same host and step, of other parts."""
    rows = [each for each in parts if isinstance(each, Fragment)]
    return dataclasses.replace(
        manifest,
        fragments=Fragments.from_rows(rows, contents=manifest.contents),
        component_files=tuple(
            each for each in parts if isinstance(each, ComponentFile)
        ),
    )


def part_of(held: Listed) -> Part:
    """The identity of a fragment or file, without its place."""
    if isinstance(held, ComponentFile):
        return held
    return held.leaf, held.box, held.digest


def place_of(held: Listed) -> Place:
    """The place of a fragment or file in the step, whatever its values."""
    return held.path if isinstance(held, ComponentFile) else (held.leaf, held.box)
