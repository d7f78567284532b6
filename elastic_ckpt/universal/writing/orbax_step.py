"""Converts to Orbax: writes a step to persistent storage, with a manifest and digests.

One host uploads and commits the step in the same way as a run's step (see
`tiers.persistent.upload`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax

from elastic_ckpt.checkpoint.host.trees import AbstractArray
from elastic_ckpt.checkpoint.structure import StepDescription
from elastic_ckpt.core import digest, errors, storage
from elastic_ckpt.steps.manifest import Host, Leaf
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.persistent import claims, upload
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.writing.convert import Conversion, Destination

_HOST = Host(id="convert-0", number=0, domains={})
# A list index.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")


class OrbaxStep(Destination):
    """See `Destination`.

    Raises:
      CheckpointError: if the target is not a step directory, Orbax would write two
        targets under one name, or a list has keys that are not numbers.
    """

    def __init__(self, conversion: Conversion) -> None:
        super().__init__(conversion)
        name = self.target.name
        if not name.isdecimal() or str(int(name)) != name:
            raise errors.CheckpointError(
                f"{self.target} is not a step directory because its name is not a"
                f" number without leading zeros; convert to {self.target / '0'}"
            )
        self._root = PersistentRoot.from_path(self.target.parent)
        # The paths in the manifest, which lists leaves in path order.
        paths = {
            target: f"{conversion.layout.tree}/{target.name}"
            if target.name
            else conversion.layout.tree
            for target in conversion.targets
        }
        self._ordered = sorted(paths, key=lambda target: paths[target])
        leaves = [
            Leaf(
                path=paths[target],
                shape=target.shape,
                dtype=target.dtype.name,
                chunk=conversion.chunk(target),
            )
            for target in self._ordered
        ]
        named = {
            tuple(map(_key, target.name.split("/"))) if target.name else (): target
            for target in conversion.targets
        }
        tree = _tree(named, (), conversion.layout.lists)
        time_ms = time.time_ns() // 1_000_000
        description = StepDescription.from_trees(
            {conversion.layout.tree: tree}, {}, metrics=None, custom_metadata=None
        ).changed(leaves=tuple(leaves), time_ms=time_ms)
        self._saved = upload.UploadedStep(
            run=f"converted-{time_ms:015d}",
            step_id=StepId(int(name), f"{time_ms:015d}"),
            contents=description.contents,
        )

    def write(self) -> Generator[int]:
        """See `Destination`."""
        root, saved = self._root, self._saved
        with contextlib.closing(claims.WriteClaim(root.path)) as write_claim:
            write_claim.check()
            steps = root.steps()
            if saved.step_id.step in steps:
                raise self.exists_already()
            if steps:
                raise errors.CheckpointError(
                    f"{root.path} already has steps"
                    f" ({errors.first_of(map(str, steps))}), but a converted step must"
                    " be a run's first step; convert to a different directory"
                )
            for each in root.leftovers():
                if each.step == saved.step_id.step:
                    storage.remove(each.path)
            yield 0
            numbers = {target: number for number, target in enumerate(self._ordered)}
            uploading = upload.Upload(root, saved, _HOST)
            uploading.begin()
            for batch in self._conversion.read(self._conversion.targets):
                values = [each.values for each in batch]
                parts = [
                    (numbers[each.target], each.box, digest.values_digest(each.values))
                    for each in batch
                ]
                uploading.write(parts, values)
                yield sum(each.nbytes for each in values)
            self._conversion.reader.checks.finish()
            uploading.finish()
            chunks = {leaf.path: leaf.chunk for leaf in saved.contents.leaves}
            texts = StepDescription.from_contents(saved.contents).files(chunks)
            orbax_files = {path: text.encode() for path, text in texts.items()}
            upload.commit(root, saved, hosts=[_HOST.id], orbax_files=orbax_files)


def _tree(
    named: Mapping[tuple[str, ...], TargetTensor],
    path: tuple[str, ...],
    lists: Sequence[str],
) -> Any:
    # Nests targets by their paths under `path`.
    if () in named:
        if len(named) > 1:
            raise errors.CheckpointError(
                f"{'/'.join(path)} is both a tensor and the parent of other tensors; in"
                f" the layout, rename {'/'.join(path)} or the tensors under it"
            )
        return _leaf(named[()])
    below: dict[str, dict[tuple[str, ...], TargetTensor]] = {}
    for (key, *rest), target in named.items():
        below.setdefault(key, {})[tuple(rest)] = target
    made = {key: _tree(each, (*path, key), lists) for key, each in below.items()}
    if "/".join(path) not in lists:
        return made
    for key in made:
        if not _NUMBER.fullmatch(key):
            raise errors.CheckpointError(
                f"{'/'.join(path)} is in the layout's `lists`, but has key {key!r},"
                " which is not a number below 10000; remove the path from `lists`"
            )
    # Orbax trees have None for elements without leaves.
    return [made.get(str(at)) for at in range(1 + max(map(int, made)))]


def _key(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _leaf(target: TargetTensor) -> Any:
    # Keeps a NumPy dtype that JAX would narrow.
    if jax.dtypes.canonicalize_dtype(target.dtype) != target.dtype:
        return AbstractArray(shape=target.shape, dtype=target.dtype)
    return jax.ShapeDtypeStruct(target.shape, target.dtype)
