"""The manifests of a step that Orbax v0 commits.

Until the commit each item has its own, which hosts wrote after their values:

    <step>.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/manifest-<host>.json
    <step>.orbax-checkpoint-tmp/data.orbax-checkpoint-tmp/manifest-<host>.json

`assemble` makes those of the step of them, which are in the format of the persistent
tier: a committed step has `<step>/manifest-<host>.json` and `orbax-digests.json`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import time
import uuid
from collections.abc import Sequence

from etils import epath

from elastic_ckpt.checkpoint import tree_structure
from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.manifests import manifest_file, search
from elastic_ckpt.manifests.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.persistent import (
    ocdbt,
    orbax_digests,
    persistent_root,
    persistent_tier,
)

_TEMPORARY = ".orbax-checkpoint-tmp"
# The identity in manifests of items, which do not know the step.
RUN, STEP, SAVE = "orbax_v0", 0, "0"


@functools.cache
def this_host() -> Host:
    """This process, in manifests."""
    number = topology.this_host()
    return Host(id=f"{number}-{uuid.uuid4().hex[:12]}", number=number, domains={})


def item_name(directory: epath.Path) -> str:
    """The name of an item or step, by its directory, committed or not."""
    return directory.name.partition(_TEMPORARY)[0]


def write_of_item(
    directory: epath.Path,
    contents: Contents,
    *,
    fragments: Sequence[Fragment] = (),
    files: Sequence[ComponentFile] = (),
) -> None:
    """Writes the manifest of this host's part of an item, which is durable already."""
    manifest_file.write(
        directory,
        Manifest(
            run=RUN,
            step=STEP,
            save=SAVE,
            host=this_host(),
            contents=contents,
            fragments=Fragments.from_rows(fragments, contents=contents),
            component_files=tuple(files),
        ),
    )


def read_of_item(directory: epath.Path) -> list[Manifest]:
    """The manifests of an item that is not committed, by the numbers of the hosts.

    Raises:
      CheckpointError: if one cannot be read, or hosts saved different trees.
    """
    names = persistent_root.manifest_names(directory)
    manifests = persistent_root.read_manifests(directory, names, run=RUN, step=STEP)
    whole: list[Manifest] = []
    for each in manifests:
        if not isinstance(each, Manifest):
            raise each
        whole.append(each)
    whole.sort(key=lambda each: each.host.number)
    for each in whole:
        if each.contents.leaves != whole[0].contents.leaves:
            raise errors.CheckpointError(
                f"{directory}: hosts {whole[0].host.number} and {each.host.number} save"
                " trees of different leaves; give the same tree on all hosts"
            )
    return whole


def assemble(directory: epath.Path) -> None:
    """Makes the manifests of a step of those of its items, which are removed.

    Does nothing if that is done. Items of other handlers have none, and stay as they
    are.

    Args:
      directory: of the step, before it is committed.

    Raises:
      CheckpointError: if one cannot be read.
    """
    items = {
        item_name(child): child
        for child in sorted(directory.iterdir())
        if child.is_dir() and persistent_root.manifest_names(child)
    }
    if not items:
        return
    for manifest in _of_step(
        directory, [read_of_item(each) for each in items.values()]
    ):
        manifest_file.write(directory, manifest)
    orbax_files = {
        f"{name}/{path}": content
        for name, item in items.items()
        if (item / orbax_digests.FILE).exists()
        for path, content in orbax_digests.read(item).items()
    }
    storage.write_atomic(
        directory / orbax_digests.FILE, orbax_digests.to_bytes(orbax_files)
    )
    for item in items.values():
        for name in [orbax_digests.FILE, *persistent_root.manifest_names(item)]:
            storage.remove(item / name)


def open_step(directory: epath.Path) -> FoundStep | None:
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
        (problem,) = persistent_root.read_manifests(
            directory, names[:1], run="", step=0
        )
        raise errors.CheckpointError(f"no manifest is left: {problem}")
    offered = persistent_tier.offers_in(
        directory, run=manifest.run, step=manifest.step, context=ocdbt.new_context()
    )
    offers = [each for each in offered.sources if each.manifest.save == manifest.save]
    step = search.Step.from_offers(offers)
    if offered.problems or not step.complete:
        problem = "; ".join(offered.problems) or step.problem()
        raise errors.CheckpointError(f"{directory}: {problem}")
    return FoundStep(step=step, sources=offered.sources)


def _of_step(
    directory: epath.Path, items: Sequence[Sequence[Manifest]]
) -> list[Manifest]:
    # One for each host, of all items.
    root = directory.parent
    run = persistent_root.find_run(root) or root.name
    number = re.search(r"(\d+)$", item_name(directory))
    now_ms = time.time_ns() // 1_000_000
    # Host 0 decides about texts.
    contents = _joined([manifests[0].contents for manifests in items], time_ms=now_ms)
    by_host: dict[str, list[Manifest]] = {}
    for each in itertools.chain.from_iterable(items):
        by_host.setdefault(each.host.id, []).append(each)
    return [
        Manifest(
            run=run,
            step=int(number[1]) if number else 0,
            save=f"{now_ms:015d}",
            host=manifests[0].host,
            contents=contents,
            fragments=_fragments(manifests, contents),
            component_files=tuple(
                file for each in manifests for file in each.component_files
            ),
        )
        for manifests in by_host.values()
    ]


def _joined(items: Sequence[Contents], *, time_ms: int) -> Contents:
    leaves = [leaf for each in items for leaf in each.leaves]
    trees = [each.trees for each in items if each.trees is not None]
    components: dict[str, int] = {}
    for each in items:
        components |= each.components
    return Contents(
        leaves=tuple(sorted(leaves, key=lambda leaf: leaf.path)),
        components=components,
        time_ms=time_ms,
        trees=tree_structure.joined(trees),
    )


def _fragments(manifests: Sequence[Manifest], contents: Contents) -> Fragments:
    if len(manifests) == 1 and manifests[0].contents.leaves == contents.leaves:
        return manifests[0].fragments
    leaf_numbers = {leaf.path: number for number, leaf in enumerate(contents.leaves)}
    rows = []
    for each in manifests:
        for number in range(len(each.fragments)):
            row = each.fragments.row(number, contents=each.contents)
            path = each.contents.leaves[row.leaf].path
            rows.append(dataclasses.replace(row, leaf=leaf_numbers[path]))
    return Fragments.from_rows(rows, contents=contents)
