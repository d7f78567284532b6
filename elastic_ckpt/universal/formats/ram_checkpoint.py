"""Opens a step on a RAM disk of this library: the newest, or one that is named.

The path is that of the RAM disk, for the newest complete step, or that of a step's
directory in it; the parts of all processes of the machine are read together. Chunks are
raw, so a tensor has a fragment for each. Names are those of an Orbax checkpoint of the
same step. `check` compares the digests of the manifests.
"""

from __future__ import annotations

import collections
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, manifest, manifest_file, search
from elastic_ckpt.steps.manifest import Contents, Leaf
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt.tiers.ram.ram_disk import RamDisk
from elastic_ckpt.universal.formats import saved_leaf
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.stored import Checksum, StoredTensor

_TEXT = "text "


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return {machine.FILE, "hosts"} <= set(names) or any(
        map(manifest_file.is_file_name, names)
    )


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a RAM disk of this machine, or the directory of a step in one.

    Raises:
      FormatError: if the step is not complete, or a file is missing or too short.
    """
    # It imports TensorStore, which other formats do not need.
    from elastic_ckpt.inspect import tier_locations

    directory = epath.Path(path)
    parsed = StepId.parse(directory.name)
    root = directory if parsed is None else directory.parent.parent.parent
    run = tier_locations.find_run(root)
    if run is None or not tier_locations.is_ram_disk(root):
        raise FormatError(
            f"{path} is no RAM disk, nor the directory of a step in one"
            " (hosts/<slot>/<step>-<save>), with a manifest that can be read"
        )
    try:
        step, directories = _step(RamDisk(root, run=run), parsed)
    except errors.CheckpointError as error:
        raise FormatError(f"{path} cannot be read: {error}") from error
    contents = step.holdings.contents
    values = {"step": step.step, **_texts(contents)}
    parts = _StepChunks(step, directories)
    return OpenedCheckpoint(
        format="elastic_ckpt RAM disk",
        tensors=list(parts.tensors()),
        values=values,
        checksums=parts.checksums,
    )


def _step(disk: RamDisk, parsed: StepId | None) -> tuple[search.Step, list[str]]:
    # The step, and the directory of each of its offers.
    if parsed is not None:
        found_step = find.of_save([disk], parsed)
    else:
        outcome = find.Search([disk]).newest()
        if outcome.found_step is None:
            problems = [*outcome.passed_over.values(), "it has no step"]
            raise errors.CheckpointError(problems[0])
        found_step = outcome.found_step
    offers = found_step.step.holdings.offers
    return found_step.step, [found_step.sources[each].directory for each in offers]


class _StepChunks:
    """The chunks of a step, and the files that hold them."""

    def __init__(self, step: search.Step, directories: list[str]) -> None:
        self._step = step
        self._directories = directories
        # The chunks of each file.
        self._chunks: dict[str, list[tuple[Leaf, manifest.Fragment]]] = (
            collections.defaultdict(list)
        )

    def tensors(self) -> Iterator[StoredTensor]:
        """The tensors of all leaves.

        Raises:
          FormatError: if a file is missing or too short.
        """
        step, holdings = self._step, self._step.holdings
        leaves = holdings.contents.leaves
        prefix = _common_prefix(leaves)
        for number, leaf in enumerate(leaves):
            yield saved_leaf.tensor(
                leaf,
                leaf.path.removeprefix(prefix),
                (self._placed(int(item), leaf) for item in holdings.of_leaf(number)),
                is_overlapping=number in step.overlapping,
            )

    def _placed(self, item: int, leaf: Leaf) -> tuple[Box, str, int]:
        # The box of an item, and its place at its first holder.
        holdings = self._step.holdings
        row = holdings.first_row[item]
        holder, number = int(holdings.holder[row]), int(holdings.number[row])
        saved = holdings.offers[holder].manifest
        fragment = saved.fragments.row(number, contents=saved.contents)
        file = f"{self._directories[holder]}/{fragment.file}"
        if file not in self._chunks:
            _check_file(file, fragment)
        values_bytes = layout.num_bytes(fragment.box, leaf.dtype)
        if not 0 <= fragment.stored_bytes - values_bytes <= layout.CHECKSUM_BYTES:
            raise FormatError(
                f"{file} has {fragment.stored_bytes} bytes of {leaf.path}"
                f"{fragment.box}, which are {values_bytes} if they are not compressed"
            )
        self._chunks[file].append((leaf, fragment))
        return fragment.box, file, fragment.offset

    def checksums(self, file: str) -> Sequence[Checksum]:
        """The digests of the chunks in a file."""
        return [
            Checksum(
                fragment.offset,
                fragment.offset + layout.num_bytes(fragment.box, leaf.dtype),
                fragment.digest,
            )
            for leaf, fragment in self._chunks.get(file, ())
        ]


def _check_file(file: str, fragment: manifest.Fragment) -> None:
    try:
        status = os.lstat(file)
    except OSError as error:
        raise FormatError(f"{file} cannot be read ({error.strerror})") from None
    needed = fragment.offset + fragment.stored_bytes
    if not stat.S_ISREG(status.st_mode) or status.st_size < needed:
        raise FormatError(
            f"{file} is no file of {needed} bytes: it has {status.st_size}; use"
            " another step"
        )


def _common_prefix(leaves: Collection[Leaf]) -> str:
    # The name of the tree, if there is one alone.
    trees = {leaf.path.partition("/")[0] for leaf in leaves}
    return f"{trees.pop()}/" if len(trees) == 1 else ""


def _texts(contents: Contents) -> dict[str, str]:
    # The texts among the leaves, which manifests have.
    trees: Mapping[str, Any] = json.loads(contents.trees or "{}").get("trees", {})
    pending: list[tuple[str, Any]] = list(trees.items())
    if len(trees) == 1:
        (tree,) = trees.values()
        pending = [("", tree)]
    texts: dict[str, str] = {}
    while pending:
        path, node = pending.pop()
        slash = f"{path}/" if path else ""
        if isinstance(node, dict):
            for key, child in node.items():
                pending.append((f"{slash}{manifest.escaped(key)}", child))
        elif isinstance(node, list):
            pending += [(f"{slash}{n}", child) for n, child in enumerate(node)]
        elif isinstance(node, str) and node.startswith(_TEXT):
            texts[path] = node.removeprefix(_TEXT)
    return texts
