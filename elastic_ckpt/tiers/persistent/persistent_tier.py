"""The persistent tier: ordinary Orbax checkpoints, found and read by their manifests.

Hosts write the checkpoints (`upload`), and any program can load them with stock Orbax.
With this library's manifests, next to Orbax's files, a host finds a box's values and
their digests without Orbax and reads only the values that it needs.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import retention
from elastic_ckpt.steps.manifest import Leaf, Manifest
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import claims, ocdbt, run_files
from elastic_ckpt.tiers.persistent.persistent_root import (
    PersistentRoot,
    commit_nsecs,
    committed,
    manifest_names,
    read_json,
    read_manifests,
)
from elastic_ckpt.tiers.source import HeldParts, Offered, OnPiece, ReadError, ignored


class PersistentTier:
    """The committed steps of a run in persistent storage; a `source.SourceTier`.

    The steps are listed once; create a new object to see new ones.

    Args:
      root: the directory of the steps.
      run: the identity of the run; other runs' steps are reported as problems.
    """

    def __init__(self, root: PersistentRoot, *, run: str) -> None:
        self.root, self._run = root, run

    @functools.cached_property
    def _are_ours(self) -> dict[int, bool]:
        return self.root.are_ours()

    @property
    def _ours(self) -> list[int]:
        return [step for step, is_ours in self._are_ours.items() if is_ours]

    def known_saves(self) -> list[StepId]:
        """This library's steps that are committed or set aside.

        The save is empty if the step belongs to another run, or if its save is unknown.
        A leased abandoned step is not set aside, so the newest step does not always
        have the newest save.

        Raises:
          CheckpointError: if storage is unreachable; also in `foreign_saves`.
        """
        commits = self.root.of_each(
            lambda step: committed(self.root.final(step)), self._ours
        )
        return self.root.set_aside_steps() + [
            StepId(step, save if run == self._run else "")
            for step, (run, save) in commits.items()
        ]

    def recorded_lines(self) -> list[Line]:
        """The newest recorded line, which may not have a step in storage yet.

        Raises:
          CheckpointError: if the record is damaged or unreachable.
        """
        newest = claims.newest(self.root.path)
        is_known = newest and newest.run == self._run and newest.line.save
        return [newest.line] if newest and is_known else []

    def foreign_saves(self) -> dict[int, str]:
        """The committed steps that stock Orbax wrote.

        Returns:
          The save that each step counts as, keyed by step, in ascending order.
        """
        foreign = [step for step, is_ours in self._are_ours.items() if not is_ours]
        return self.root.of_each(self.root.foreign_save, foreign)

    def notes(self, step: int) -> dict[str, Any]:
        """Orbax's metadata of a committed step.

        Returns:
          A dict with `metrics`, `custom_metadata` and `commit_timestamp_nsecs`, each
          None if the step does not have it.
        """
        directory = self.root.final(step)
        metadata = read_json(directory / "_CHECKPOINT_METADATA") or {}
        return {
            "metrics": read_json(directory / "metrics" / "metrics") or None,
            "custom_metadata": metadata.get("custom_metadata") or None,
            "commit_timestamp_nsecs": metadata.get("commit_timestamp_nsecs"),
        }

    def offers(self, step: int) -> Offered:
        """See `source.SourceTier`; empty if the step is uncommitted or unreachable."""
        held: list[HeldParts] = []
        problems: list[str] = []
        try:
            for directory in self._directories(step):
                source = StepSource(str(directory))
                for each in read_manifests(directory, run=self._run, step=step):
                    if isinstance(each, checked_json.LaterVersionError):
                        raise each
                    if isinstance(each, Manifest):
                        of_step = each.at("persistent", source.directory)
                        held.append(HeldParts(of_step, source))
                    else:
                        problems.append(str(each))
        except checked_json.LaterVersionError:
            raise
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            errors.check_open_files(error)
            problems.append(f"{self.root.final(step)} cannot be read ({error})")
        return Offered(held, problems)

    def _directories(self, step: int) -> list[epath.Path]:
        # The directories of all saves of a step.
        aside = [
            self.root.aside(each)
            for each in self.root.set_aside_steps()
            if each.step == step
        ]
        return (
            [self.root.final(step), *aside] if self.root.is_committed(step) else aside
        )

    def held(self, line: Line) -> list[retention.TierStep]:
        """The committed steps of this run, for retention.

        Skips steps of another run, or of a later version of elastic_ckpt. The time is
        the commit time in Orbax's metadata (1970 if that is damaged); the metrics come
        from Orbax's files and from evaluations.
        """
        found = self.root.of_each(self._held, self._ours)
        held = [each for each in found.values() if each is not None]
        evaluated = run_files.evaluations(self.root, line, run=self._run)
        metrics = {step: json.loads(text) for step, text in evaluated}
        return retention.with_evaluations(held, metrics)

    def preserved(self) -> list[int]:
        """The pinned steps, in ascending order."""
        found = self.root.of_each(
            lambda step: preserved.is_preserved(self.root.final(step)),
            list(self._are_ours),
        )
        return [step for step in found if found[step]]

    def remove_all(self, step: int) -> bool:
        """Removes all saves of a step; returns whether there were any."""
        there = self._directories(step)
        ours = [each for each in there if manifest_names(each) or committed(each)[0]]
        for directory in ours:
            self.root.remove(directory)
        return bool(ours)

    def _held(self, step: int) -> retention.TierStep | None:
        directory = self.root.final(step)
        if committed(directory)[0] != self._run:
            return None
        metrics = read_json(directory / "metrics" / "metrics")
        if metrics is None:
            logging.warning("step %d is kept, because its metrics are not JSON", step)
        return retention.TierStep(
            step=step,
            time_ms=commit_nsecs(directory) // 1_000_000,
            metrics=metrics or None,
            complete=None if metrics is None else True,
        )


class StepSource:
    """Reads a step's files and the values in its stores; a `source.Source`."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        context = ocdbt.new_context()
        # By tree name.
        self._store = functools.cache(
            lambda name: ocdbt.open_store(f"{directory}/{name}", context)
        )

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> int:
        """See `source.Source`."""
        content = self._read(leaf, box, len(into))
        into[:] = content[: len(into)]
        on_piece(into)
        return len(content)

    def lent(self, leaf: Leaf, box: Box) -> np.ndarray:
        """See `source.LendingSource`."""
        num_bytes = leaf.num_bytes(box)
        content = self._read(leaf, box, num_bytes)
        return np.frombuffer(content, np.uint8, num_bytes)

    def _read(self, leaf: Leaf, box: Box, least: int) -> memoryview:
        try:
            if leaf.is_file:
                content = storage.read_bytes(f"{self.directory}/{leaf.path}")
            else:
                content = self._store(leaf.checkpointable)[ocdbt.key(leaf, box)]
        except (FileNotFoundError, KeyError):
            raise ReadError("is missing") from None
        # TensorStore raises ValueErrors.
        except (*bucket_clients.failures(), ValueError) as error:
            errors.check_open_files(error)
            raise ReadError(f"cannot be read ({error})") from error
        if len(content) < least:
            raise ReadError(
                f"ends after {len(content)} bytes, but should be {least} bytes long"
            )
        return memoryview(content)
