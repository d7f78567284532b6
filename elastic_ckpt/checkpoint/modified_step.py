"""Edits numbers of a step in persistent storage: the same step, under a new save.

The step is written once more, part by part, as a host writes it: each part is verified,
only the edited ones differ, and the commit is that of all saves. The version before is
set aside, where it stays until retention takes it; killed at any point, it counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint import number_edit
from elastic_ckpt.checkpoint.components import encoding
from elastic_ckpt.checkpoint.host import upload_share, verified_read
from elastic_ckpt.checkpoint.number_edit import Change, Edit
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import digest, errors, storage
from elastic_ckpt.steps import layout
from elastic_ckpt.steps import line as line_of
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.line import FROM_SCRATCH, Line
from elastic_ckpt.steps.manifest import Host, Leaf
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.find import Search
from elastic_ckpt.tiers.persistent import (
    arrange,
    commit,
    orbax_digests,
    persistent_root,
    upload,
    writer,
    writers,
)
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.persistent_tier import PersistentTier

_BATCH_BYTES = layout.CHUNK_BYTES
_BATCH_ITEMS = 2048
_HOST = Host(id="modified", number=0, domains={})


class ModifiedStep:
    """A step in persistent storage that can be modified.

    Args:
      step_path: the directory of the step.

    Raises:
      CheckpointError: if there is no complete step of a run of this library, or a later
        one is there, which would count no longer.
    """

    def __init__(self, step_path: epath.PathLike) -> None:
        directory = storage.absolute(step_path)
        if not directory.name.isdecimal():
            raise errors.CheckpointError(
                f"{directory} is not the directory of a step; name"
                " PERSISTENT_DIRECTORY/<step>"
            )
        self._root = PersistentRoot.from_path(directory.parent)
        self._step = int(directory.name)
        run = persistent_root.find_run(self._root.path) or self._run_aside()
        if run is None:
            # Raises an error if a later version of elastic_ckpt wrote the step.
            PersistentTier(self._root, run="").offers(self._step)
            raise errors.CheckpointError(
                f"{self._root.path} contains no steps that elastic_ckpt has saved (none"
                " has a manifest); check the directory"
            )
        self._run = run
        self._tier = PersistentTier(self._root, run=run)
        self._search = Search([self._tier], lines=self._tier.recorded_lines())
        saved = self._search.of_step(self._step).step
        if self._search.line.abandons(StepId(self._step, saved.save)):
            raise errors.CheckpointError(
                f"step {self._step} in {self._root.path} was abandoned when the run"
                " went back to an earlier step; modify a step that the run would"
                " continue from"
            )
        newest = self._search.newest().found_step
        if newest is not None and newest.step.step > self._step:
            raise errors.CheckpointError(
                f"step {self._step} is not the newest in {self._root.path}: step"
                f" {newest.step.step} was trained from it, and would be abandoned;"
                " modify that step, or first move the later steps out of the directory"
            )
        self._original = saved

    def changes(self, component: str, edits: Sequence[Edit]) -> list[Change]:
        """The changes that edits make; writes nothing.

        Args:
          component: the name of a tree, such as `state`, or of a component of
            `ec.components`. An edit of a component with several states, such as one for
            each host, is made in all of them.
          edits: of numbers in it.

        Raises:
          CheckpointError: if a number is not there, or the new value is none of its
            type.
        """
        holdings, reader = self._read()
        holder = f"step {self._step} in {self._root.path}"
        if component in holdings.contents.components:
            states = number_edit.states_of(holdings, reader, component)
            return [
                number_edit.change_in_state(encoded, file, component, each)
                for each in edits
                for file, encoded in states.items()
            ]
        return [
            number_edit.change(
                _number(
                    holdings, reader, number_edit.full_path(component, each), holder
                ),
                each,
            )
            for each in edits
        ]

    def modify(self, changes: Sequence[Change]) -> str:
        """Writes the step with some changes, and returns the name of the new save.

        No run may write to the directory meanwhile; see `alone`.

        Raises:
          CheckpointError: if a part of it cannot be read, or storage fails.
        """
        step, save = self._step, self._new_save()
        line = Line(save=save, parents=self._parents())
        if self._root.in_place:
            arrange.arrange(self._root, line, run=self._run, step=step)
        # In an object store the files were set aside.
        holdings, reader = self._read()
        saved = self._saved(holdings, save, line)
        uploading = upload.Upload(self._root, saved, _HOST)
        uploading.begin()
        _write(holdings, reader, uploading, changes)
        uploading.finish()
        commit.commit(
            self._root,
            saved,
            hosts=[_HOST.id],
            orbax_files=orbax_digests.read(self._directory()),
            make_way=lambda: arrange.arrange(
                self._root, line, run=self._run, step=step
            ),
        )
        return save

    @contextlib.contextmanager
    def alone(self, *, is_stopped: bool = False) -> Iterator[None]:
        """Keeps runs from writing to the directory while the block runs.

        Args:
          is_stopped: whether no run is alive, by the caller's word: object stores have
            no locks that show it.

        Raises:
          RunError: if a run is alive, or it is not known.
        """
        stop = (
            "stop it (SIGTERM to its processes, or delete its job) and wait until it"
            " has ended, then modify the step"
        )
        if not storage.is_local(self._root.path):
            if not is_stopped:
                raise errors.RunError(
                    f"{self._root.path} is not a local directory, so it has no lock"
                    " that shows whether a program writes to it; if one is running,"
                    f" {stop}; then add --stopped"
                )
            with writer.Writer(self._root.path, advice=stop):
                yield
            return
        presence = storage.Presence(self._root.path / writers.LOCK)
        try:
            with presence.alone() as alone:
                if not alone:
                    raise errors.RunError(
                        f"a running program writes to {self._root.path}; {stop}"
                    )
                with writer.Writer(self._root.path, advice=stop):
                    yield
        finally:
            presence.close()

    def _saved(self, holdings: Holdings, save: str, line: Line) -> upload.UploadedStep:
        contents = dataclasses.replace(holdings.contents, parents=line.parents)
        chunks = upload_share.chunk_shapes(holdings)
        return upload.UploadedStep(
            run=self._run,
            step_id=StepId(self._step, save),
            contents=contents,
            arrays=StepDescription.from_contents(contents).arrays(chunks),
        )

    def _parents(self) -> tuple[StepId, ...]:
        # Those of a save that replaces this step: its line without it.
        before = self._original.holdings.contents.parents
        if self._step == 0:
            return before or FROM_SCRATCH
        return line_of.after(StepId(self._step - 1, self._original.save), before)

    def _new_save(self) -> str:
        known = [save for _, save in self._tier.known_saves()]
        known += [self._original.save, self._search.line.save]
        newest = max((int(save) for save in known if save.isdecimal()), default=0)
        return f"{max(time.time_ns() // 1_000_000, newest + 1):015d}"

    def _directory(self) -> epath.Path:
        # The present directory of the step's files.
        save = self._original.save
        if self._root.is_committed(self._step) and save == arrange.save_of(
            self._root, self._step, run=self._run
        ):
            return self._root.final(self._step)
        return self._root.aside(StepId(self._step, save))

    def _read(self) -> tuple[Holdings, verified_read.VerifiedReader]:
        sources = {
            offer: source
            for offer, source in self._tier.offers(self._step).sources.items()
            if offer.manifest.save == self._original.save
        }
        holdings = Holdings.from_offers(list(sources))
        return holdings, verified_read.VerifiedReader(sources)

    def _run_aside(self) -> str | None:
        aside = self._root.set_aside_steps()
        runs = (persistent_root.run_of(self._root.aside(each)) for each in aside)
        return next((run for run in runs if run is not None), None)


def _write(
    holdings: Holdings,
    reader: verified_read.VerifiedReader,
    uploading: upload.Upload,
    changes: Sequence[Change],
) -> None:
    after = {each.path: each.after for each in changes if not each.file}
    paths = [leaf.path for leaf in holdings.contents.leaves]
    num_chunks = len(holdings.leaf)
    items = np.arange(holdings.num_items)
    for batch in upload_share.batches(
        items, holdings.stored_bytes, most_bytes=_BATCH_BYTES, most_items=_BATCH_ITEMS
    ):
        chunks = []
        for item in batch.tolist():
            if item >= num_chunks:
                file = holdings.files[item - num_chunks]
                content = reader.file(file, holdings.holders(item))
                uploading.write_file(*number_edit.edited_file(file, content, changes))
                continue
            fragment = holdings.fragment(int(holdings.first_row[item]))
            values = verified_read.read_item(holdings, item, reader)
            checksum, path = fragment.digest, paths[fragment.leaf]
            if path in after:
                values = np.full(values.shape, after[path], values.dtype)
                checksum = digest.values_digest(values)
            chunks.append(upload.Chunk(fragment.leaf, fragment.box, values, checksum))
        uploading.write_chunks(chunks)


def _number(
    holdings: Holdings, reader: verified_read.VerifiedReader, path: str, holder: str
) -> encoding.Number:
    leaves = {leaf.path: n for n, leaf in enumerate(holdings.contents.leaves)}
    if path not in leaves:
        numbers = [each.path for each in holdings.contents.leaves if _is_number(each)]
        raise number_edit.missing(path, holder, numbers)
    leaf = holdings.contents.leaves[leaves[path]]
    if not _is_number(leaf):
        raise errors.CheckpointError(
            f"{path} is {leaf.dtype}{list(leaf.shape)}, and only single numbers can be"
            " edited"
        )
    item = int(np.searchsorted(holdings.leaf, leaves[path]))
    values = verified_read.read_item(holdings, item, reader)
    return encoding.Number(path, leaf.dtype, values.reshape(()))


def _is_number(leaf: Leaf) -> bool:
    dtype = np.dtype(leaf.dtype)
    return all(size == 1 for size in leaf.shape) and dtype.kind in encoding.NUMBER_KINDS
