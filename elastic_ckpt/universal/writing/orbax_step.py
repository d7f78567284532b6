"""Conversions to Orbax: a step of persistent storage, with our manifest and digests.

It is uploaded and committed as the steps of runs are, by one host
(`tiers.persistent.upload`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Generator, Iterator, Sequence
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
from elastic_ckpt.universal.writing.conversion import Conversion
from elastic_ckpt.universal.writing.convert import Destination

_HOST = Host(id="convert-0", number=0, domains={})
# An index of a list.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")


class OrbaxStep(Destination):
    """See `Destination`.

    Raises:
      CheckpointError: if the target is not the directory of a step, Orbax would write
        two targets under one name, or a list has keys that are no numbers.
    """

    def __init__(self, conversion: Conversion) -> None:
        super().__init__(conversion)
        name = self.target.name
        if not name.isdecimal() or str(int(name)) != name:
            raise errors.CheckpointError(
                f"{self.target} is not the directory of a step, whose name is its"
                f" number; convert to {self.target / '0'}"
            )
        self._root = PersistentRoot.from_path(self.target.parent)
        time_ms = time.time_ns() // 1_000_000
        leaves = [
            Leaf(
                path=self._path(target),
                shape=target.shape,
                dtype=target.dtype.name,
                chunk=conversion.chunk(target),
            )
            for target in conversion.targets
        ]
        tree = _with_lists(_tree(conversion.targets), "", conversion.lists)
        description = StepDescription.from_trees(
            {conversion.tree: tree}, {}, metrics=None, custom_metadata=None
        )
        leaves.sort(key=lambda leaf: leaf.path)
        described = description.changed(leaves=tuple(leaves), time_ms=time_ms)
        self._saved = upload.UploadedStep(
            run=f"converted-{time_ms:015d}",
            step_id=StepId(int(name), f"{time_ms:015d}"),
            contents=described.contents,
        )

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """See `Destination`."""
        root, step = self._root, self._saved.step_id.step
        with contextlib.closing(claims.Writer(root.path)) as writer:
            writer.check()
            others = [each for each in root.steps() if each != step]
            if others:
                raise errors.CheckpointError(
                    f"{root.path} has steps already"
                    f" ({errors.first_of(map(str, others))}), and a converted step is"
                    " the first of a run; convert to another directory"
                )
            if root.is_committed(step):
                raise self.exists_already()
            for each in root.leftovers():
                if each.step == step:
                    storage.remove(each.path)
            yield

    def write(self) -> Generator[int]:
        """See `Destination`."""
        conversion, saved = self._conversion, self._saved
        leaves = saved.contents.leaves
        numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
        uploading = upload.Upload(self._root, saved, _HOST)
        uploading.begin()
        for group in conversion.groups():
            needed = {target: conversion.boxes(target) for target in group}
            for batch in conversion.read(needed):
                parts = [
                    (
                        numbers[self._path(target)],
                        box,
                        digest.values_digest(values),
                    )
                    for target, box, values in batch
                ]
                uploading.write(parts, [values for *_, values in batch])
                yield sum(values.nbytes for *_, values in batch)
        uploading.finish()
        description = StepDescription.from_contents(saved.contents)
        texts = description.files({leaf.path: leaf.chunk for leaf in leaves})
        orbax_files = {path: text.encode() for path, text in texts.items()}
        upload.commit(self._root, saved, hosts=[_HOST.id], orbax_files=orbax_files)

    def _path(self, target: TargetTensor) -> str:
        # In manifests.
        tree = self._conversion.tree
        return f"{tree}/{target.name}" if target.name else tree


def _tree(targets: Sequence[TargetTensor]) -> Any:
    root: dict[str, Any] = {}
    for target in targets:
        # A target without a name is the whole tree.
        *above, last = ["", *map(_key, target.name.split("/"))] if target.name else [""]
        node: Any = root
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise errors.CheckpointError(
                f"{target.name} lies below, or above, another target, which is an array"
                " and has no parts; rename one of them in the layout"
            )
        node[last] = _leaf(target)
    return root[""]


def _with_lists(tree: Any, path: str, lists: Sequence[str]) -> Any:
    # Trees of Orbax have None for elements without leaves.
    if not isinstance(tree, dict):
        return tree
    made = {
        key: _with_lists(node, f"{path}/{key}" if path else key, lists)
        for key, node in tree.items()
    }
    if path not in lists:
        return made
    for key in made:
        if not _NUMBER.fullmatch(key):
            raise errors.CheckpointError(
                f"{path} is listed in `lists` of the layout, but has the key {key!r},"
                " which is no number below 10000; remove it from `lists`"
            )
    return [made.get(str(at)) for at in range(1 + max(map(int, made)))]


def _key(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _leaf(target: TargetTensor) -> Any:
    # One of NumPy if JAX would narrow it.
    if jax.dtypes.canonicalize_dtype(target.dtype) != target.dtype:
        return AbstractArray(shape=target.shape, dtype=target.dtype)
    return jax.ShapeDtypeStruct(target.shape, target.dtype)
