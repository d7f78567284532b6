"""The manifest of a step that Orbax v0 commits, in the format of the persistent tier.

An item is uploaded as a step is: each host writes its store and its manifest
into the item's directory. When all have done that, host 0 merges the stores, and adds
the item to the one manifest of the step, which has its items so far:

    <step>.orbax-checkpoint-tmp/manifest-orbax_v0-0.json
    <step>.orbax-checkpoint-tmp/orbax-digests.json
    <step>.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
import types
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint import tree_structure
from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import digest, errors, storage, topology
from elastic_ckpt.steps import manifest_file, read_plan
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.persistent import (
    commit,
    orbax_digests,
    persistent_root,
    persistent_tier,
    upload,
)

# The file by which Orbax marks a checkpoint.
_METADATA = "_CHECKPOINT_METADATA"
# The run, step and save of an item, which does not know its step.
OF_ITEM = ("orbax_v0", StepId(0, "0"))
# The items of a step are finished in several threads.
_adding = threading.Lock()


class _OneDirectory(persistent_root.PersistentRoot):
    # The root of the step, or of the item, that `path` is itself.
    def final(self, step: int) -> epath.Path:
        del step
        return self.path


def this_host() -> Host:
    """This process, in manifests."""
    return _host(topology.this_host())


def item_name(directory: epath.Path) -> str:
    """The name of an item or step, by its directory, committed or not."""
    return directory.name.partition(".orbax-checkpoint-tmp")[0]


def is_item(directory: epath.Path, *, timeout_secs: float) -> bool:
    """Whether a directory is that of an item, not of a whole checkpoint.

    Orbax marks each checkpoint by its metadata, which it may write in the background
    after the directory: this waits for them.

    Raises:
      CheckpointError: if there are none in time.
    """
    deadline = time.monotonic() + timeout_secs
    while not (directory / _METADATA).exists():
        if (directory.parent / _METADATA).exists():
            return True
        if time.monotonic() > deadline:
            raise errors.CheckpointError(
                f"{directory.parent}: Orbax has not written {_METADATA} in"
                f" {timeout_secs:.0f} s; check that storage takes files"
            )
        time.sleep(0.01)
    return False


def item_root(directory: epath.Path) -> persistent_root.PersistentRoot:
    """The root by which an `upload.Upload` writes into the directory of an item."""
    return _OneDirectory(path=directory, in_place=True)


def add_tree(
    directory: epath.Path,
    saved: upload.UploadedStep,
    orbax_files: Mapping[str, bytes],
    *,
    num_hosts: int,
) -> None:
    """Makes an item of what all hosts have uploaded, and adds it to its step.

    Args:
      directory: of the item, not committed yet.
      saved: what was uploaded.
      orbax_files: what Orbax adds to the values, by path in the item.
      num_hosts: that have finished.

    Raises:
      CheckpointError: if uploads are not all of the item, or storage fails.
    """
    hosts = [_host(number).id for number in range(num_hosts)]
    uploaded = commit.assemble(directory, saved, hosts=hosts, orbax_files=orbax_files)
    for host in hosts:
        storage.remove(directory / manifest_file.file_name(host))
    name = item_name(directory)
    paths = [leaf.path for leaf in saved.contents.leaves]
    rows = [
        (paths[row.leaf], dataclasses.replace(row, file=f"{name}/{row.file[2:]}"))
        for each in uploaded
        for row in each.rows
    ]
    of_step = {f"{name}/{path}": content for path, content in orbax_files.items()}
    _add(directory.parent, saved.contents, rows=rows, orbax_files=of_step)


def add_files(directory: epath.Path) -> None:
    """Adds the files that all hosts have written into the directory of an item."""
    name = item_name(directory)
    paths = [parent / file for parent, _, files in directory.walk() for file in files]
    listed = []
    for number, path in enumerate(sorted(paths)):
        content = np.frombuffer(path.read_bytes(), np.uint8)
        file = ComponentFile(
            component=name,
            parts=(number, number + 1),
            path=f"{name}/{path.relative_to(directory).as_posix()}",
            digest=digest.values_digest(content),
            stored_bytes=content.nbytes,
        )
        listed.append(file)
    contents = Contents(leaves=(), components={name: len(listed)})
    _add(directory.parent, contents, files=listed)


def open_step(directory: epath.Path) -> find.FoundStep | None:
    """The step in a directory, committed by Orbax or by our checkpointer.

    Returns:
      None if no manifest is there: plain Orbax wrote the step.

    Raises:
      CheckpointError: if its manifests are damaged, or do not list all of it.
    """
    names = persistent_root.manifest_names(directory)
    if not names:
        return None
    manifest = persistent_root.any_manifest(directory)
    if manifest is None:
        # Raises the problem.
        manifest = manifest_file.read(directory / names[0], run="", step=0)
    root = _OneDirectory(path=directory, in_place=False)
    tier = persistent_tier.PersistentTier(root, run=manifest.run)
    return find.of_save([tier], manifest.step_id)


def verify_files(directory: epath.Path) -> None:
    """Compares the files of an item with their digests, if it has manifests.

    Raises:
      CheckpointError: if one is not what was saved, or as `open_step`.
    """
    opened = open_step(directory.parent)
    if opened is None:
        return
    reader = verified_read.VerifiedReader(opened.sources)
    for listed in read_plan.files(opened.step, this_host(), directory.name):
        reader.file(*listed)


def _add(
    directory: epath.Path,
    item: Contents,
    *,
    rows: Sequence[tuple[str, Fragment]] = (),
    files: Sequence[ComponentFile] = (),
    orbax_files: Mapping[str, bytes] = types.MappingProxyType({}),
) -> None:
    # Adds an item to the manifest of its step: its fragments by the paths of their
    # leaves, and its files.
    with _adding:
        step = _manifest_of(directory)
        before = step.contents
        leaves = sorted(before.leaves + item.leaves, key=lambda leaf: leaf.path)
        trees = [each.trees for each in (before, item) if each.trees is not None]
        contents = dataclasses.replace(
            before,
            leaves=tuple(leaves),
            components={**before.components, **item.components},
            trees=tree_structure.joined(trees),
        )
        numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
        every = [(before.leaves[row.leaf].path, row) for row in step.rows] + [*rows]
        fragments = Fragments.from_rows(
            [dataclasses.replace(row, leaf=numbers[path]) for path, row in every],
            contents=contents,
        )
        manifest = dataclasses.replace(
            step,
            contents=contents,
            fragments=fragments,
            component_files=(*step.component_files, *files),
        )
        manifest_file.write(directory, manifest)
        orbax_digests.add(directory, orbax_files)


def _manifest_of(directory: epath.Path) -> Manifest:
    # The manifest of a step with the items that were added so far.
    for name in persistent_root.manifest_names(directory):
        return manifest_file.parse((directory / name).read_bytes(), stores=True)
    root, now_ms = directory.parent, time.time_ns() // 1_000_000
    number = re.search(r"(\d+)$", item_name(directory))
    nothing = Contents(leaves=(), components={}, time_ms=now_ms)
    return Manifest(
        run=persistent_root.find_run(root) or root.name,
        step=int(number[1]) if number else 0,
        save=f"{now_ms:015d}",
        host=this_host(),
        contents=nothing,
        fragments=Fragments.from_rows((), contents=nothing),
        component_files=(),
    )


def _host(number: int) -> Host:
    return Host(id=f"orbax_v0-{number}", number=number, domains={})
