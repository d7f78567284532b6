"""Commit: makes an ordinary Orbax checkpoint of the hosts' uploads, atomically.

One host commits when all have finished. It merges their stores, adds the files that
Orbax requires, and only then makes the step visible, by a rename or by a last file (see
`persistent_root`). Killed at any point it can be repeated, by any host: until the very
end the step does not exist, for us or for Orbax, and from then on it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, errors, storage
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.search import Step
from elastic_ckpt.tiers.persistent import ocdbt, orbax_digests, progress
from elastic_ckpt.tiers.persistent.persistent_root import (
    COMMIT_FILE,
    PersistentRoot,
    commit_text,
    read_manifests,
)
from elastic_ckpt.tiers.persistent.retries import PATIENT, Retries
from elastic_ckpt.tiers.persistent.upload import UploadedStep


def commit(
    root: PersistentRoot,
    saved: UploadedStep,
    *,
    hosts: Collection[str],
    orbax_files: Mapping[str, bytes],
    make_way: Callable[[], None] = lambda: None,
    retries: Retries = PATIENT,
) -> None:
    """Commits a step; does nothing if this save of it is committed already.

    Files that interrupted uploads left in the step's directory are removed.

    Args:
      root: of the steps.
      saved: what was uploaded.
      hosts: the ids of those that took part; each has to have finished.
      orbax_files: contents by path in the step (`checkpoint.orbax_format`).
      make_way: called before the step becomes visible; older saves of it have to leave.
      retries: how long to wait for storage, and the callback for failures.

    Raises:
      CheckpointError: if hosts have not finished, what they wrote is not all of the
        step, the step exists by another save, or storage fails for good.
    """
    unfinished = root.unfinished(saved.step_id)
    doing = f"committing {unfinished}"
    if not retries.call(
        doing,
        lambda: root.is_pending(saved.step_id, run=saved.run),
    ):
        if not root.in_place:
            # A host may have begun again before it received the commit.
            retries.call(doing, lambda: storage.remove(unfinished))
        return
    digests = {orbax_digests.FILE: orbax_digests.to_bytes(orbax_files)}
    manifests = assemble(
        unfinished,
        saved,
        hosts=hosts,
        orbax_files={**orbax_files, **digests},
        retries=retries,
    )
    parts = {name.partition("/")[0] for name in [*orbax_files, *_files(manifests)]}
    success = commit_text(root.final(saved.step_id.step), saved.run, saved.step_id.save)
    retries.call(doing, make_way)
    for path in _commit_files(unfinished, saved, parts):
        retries.call(doing, lambda path=path: _write(path, success))
    if not root.in_place:
        final = root.final(saved.step_id.step)
        retries.call(doing, lambda: _rename(unfinished, final))


def assemble(
    unfinished: epath.Path,
    saved: UploadedStep,
    *,
    hosts: Collection[str],
    orbax_files: Mapping[str, bytes],
    retries: Retries = PATIENT,
) -> list[Manifest]:
    """Merges the uploads of all hosts, and adds Orbax's files; commits nothing.

    Args:
      unfinished: the directory that was uploaded into.
      saved: see `commit`; the others likewise.
      hosts: the ids of those that took part.
      orbax_files: contents by path in `unfinished`.
      retries: how long to wait for storage.

    Returns:
      The manifests of the hosts.

    Raises:
      CheckpointError: see `commit`.
    """
    doing = f"committing {unfinished}"
    manifests = _manifests(unfinished, saved, sorted(hosts))
    if not _step(manifests).complete:
        manifests += retries.call(doing, lambda: _earlier(unfinished, saved, manifests))
    step = _step(manifests)
    if not step.complete:
        raise errors.CheckpointError(
            f"{unfinished} cannot be committed: {step.problem()}; upload the step again"
        )
    stores = _stores(manifests)
    retries.call(doing, lambda: _drop_unnamed(unfinished, manifests))
    for checkpointable, names in stores.items():
        store = unfinished / checkpointable
        retries.call(doing, lambda store=store, names=names: ocdbt.merge(store, names))
    for checkpointable, arrays in _empty_arrays(saved).items():
        store = unfinished / checkpointable
        retries.call(
            doing,
            lambda store=store, arrays=arrays: ocdbt.write(
                store, arrays, ocdbt.new_context()
            ),
        )
    for name, content in orbax_files.items():
        path = unfinished / name
        retries.call(doing, lambda path=path, content=content: _write(path, content))
    return manifests


def _commit_files(
    unfinished: epath.Path, saved: UploadedStep, parts: Collection[str]
) -> list[epath.Path]:
    # Orbax commits each part of a step, and last the step. A component without files
    # is a directory to Orbax.
    components = saved.contents.components
    directories = [unfinished / part for part in sorted({*parts, *components})]
    return [
        each / COMMIT_FILE
        for each in [*directories, unfinished]
        if each.name in components or each.is_dir()
    ]


def _manifests(
    unfinished: epath.Path, saved: UploadedStep, hosts: Sequence[str]
) -> list[Manifest]:
    names = [manifest_file.file_name(host) for host in hosts]
    manifests = read_manifests(
        unfinished, names, run=saved.run, step=saved.step_id.step
    )
    manifests = [
        each
        for each in manifests
        if isinstance(each, Manifest) and each.save == saved.step_id.save
    ]
    done = {each.host.id for each in manifests}
    missing = [host for host in hosts if host not in done]
    if missing or not manifests:
        raise errors.CheckpointError(
            f"{unfinished} cannot be committed: {len(missing)} of {len(hosts)} hosts"
            f" have not finished their uploads ({errors.first_of(missing)});"
            " wait for them, or upload the step again on the hosts that are there"
        )
    return manifests


def _step(manifests: Sequence[Manifest]) -> Step:
    return Step.from_offers(
        [Offer(tier="persistent", manifest=each) for each in manifests]
    )


def _earlier(
    unfinished: epath.Path, saved: UploadedStep, manifests: Sequence[Manifest]
) -> list[Manifest]:
    # Manifests of the parts that hosts of earlier worlds have uploaded, and the present
    # ones have not.
    covered = {
        progress.place_of(part) for each in manifests for part in progress.listed(each)
    }
    hosts = {each.host.id for each in manifests}
    earlier: list[Manifest] = []
    for each in progress.read(
        unfinished,
        run=saved.run,
        step_id=saved.step_id,
        contents=saved.contents,
    ):
        listed = {progress.place_of(part): part for part in progress.listed(each)}
        parts = {place: part for place, part in listed.items() if place not in covered}
        if each.host.id in hosts or not parts:
            continue
        hosts.add(each.host.id)
        covered |= parts.keys()
        manifest = progress.listing(each, list(parts.values()))
        earlier.append(manifest)
        manifest_file.write(unfinished, manifest)
    return earlier


def _rename(unfinished: epath.Path, final: epath.Path) -> None:
    # Over NFS an attempt that seemed to fail may have been carried out.
    if unfinished.exists() or not final.exists():
        storage.rename(unfinished, final)


def _files(manifests: Sequence[Manifest]) -> set[str]:
    return {file.path for each in manifests for file in each.component_files}


def _stores(manifests: Sequence[Manifest]) -> dict[str, set[str]]:
    # By checkpointable, the stores that hosts wrote chunks of it into.
    stores: dict[str, set[str]] = {}
    for each in manifests:
        for file in each.fragments.files:
            checkpointable, _, store = file.partition("//")[0].rpartition("/")
            stores.setdefault(checkpointable, set()).add(store)
    return stores


def _empty_arrays(saved: UploadedStep) -> dict[str, list[ocdbt.Chunk]]:
    # By checkpointable. They have no chunks that a host could upload, but Orbax
    # requires their metadata like that of others.
    empty: dict[str, list[ocdbt.Chunk]] = {}
    for leaf in saved.contents.leaves:
        if 0 in leaf.shape:
            array = saved.arrays[leaf.path]
            chunk = ocdbt.Chunk(
                leaf=leaf,
                array=array,
                box=boxes.whole(leaf.shape),
                values=np.empty(leaf.shape, leaf.dtype),
            )
            empty.setdefault(array.checkpointable, []).append(chunk)
    return empty


def _drop_unnamed(unfinished: epath.Path, manifests: Sequence[Manifest]) -> None:
    # Leaves the manifests and what they name.
    named = _files(manifests)
    named |= {manifest_file.file_name(each.host.id) for each in manifests}
    for checkpointable, stores in _stores(manifests).items():
        named |= {str(epath.Path(checkpointable) / store) for store in stores}
    above = {str(parent) for name in named for parent in epath.Path(name).parents}
    pending = [(unfinished, "")]
    while pending:
        directory, prefix = pending.pop()
        for child in directory.iterdir():
            name = prefix + child.name
            if name in above:
                pending.append((child, f"{name}/"))
            elif name not in named:
                storage.remove(child)


def _write(path: epath.Path, content: bytes) -> None:
    storage.make_directory(path.parent)
    storage.write_atomic(path, content)
