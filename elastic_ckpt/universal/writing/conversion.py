"""A planned conversion: a checkpoint, rules matched with it, and its targets."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Generator, Mapping, Sequence

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal import default_layout, opening, shipped_layouts
from elastic_ckpt.universal.formats import hugging_face, peft_adapter
from elastic_ckpt.universal.moves import Fill, Matched, Move, TargetTensor
from elastic_ckpt.universal.reading.planned_reads import PlannedReads
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.reading.transfer import Transfer
from elastic_ckpt.universal.rules import matching, name_pattern
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.state import PARAMETER
from elastic_ckpt.universal.stored import Checkpoint, StoredTensor
from elastic_ckpt.universal.writing import chunks
from elastic_ckpt.universal.writing.files import Needed

BUDGET_BYTES = 2**28
# The memory of boxes that were written is kept for those that are read next.
REUSED_BYTES = 2**26
_PLAIN_TIMES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A conversion, as a user requests it.

    Attributes:
      source: the path of a checkpoint of any format that is read.
      target: the path of the one to write.
      rules: the path of a layout, or the name of one that ships; None for that of the
        checkpoint, see `default_layout`.
      sizes: of dims that shapes do not determine, beside those in the layout.
      is_reversed: whether the layout leads from the target to the source.
      to: the format that is written.
      config: a model of Hugging Face, whose `config.json` has values for the layout:
        a directory, or the id of one in the hub's local cache, `hf://org/name`.
      dtype: that floating-point tensors are cast to; None keeps that of each.
      only_weights: whether the optimizer and the step are left out.
    """

    source: str
    target: str
    rules: str | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_reversed: bool = False
    to: str = "orbax"
    config: str | None = None
    dtype: str | None = None
    only_weights: bool = False


class Conversion:
    """An open checkpoint, and the tensors that a layout makes of it.

    Args:
      job: what is converted.

    Attributes:
      job: the same, with the layout that ships for the source if none is given.
      checkpoint: that is open.
      matched: the moves from its tensors.
      targets: in the order in which their sources are stored.
      lists: the paths of trees of targets that are lists.
      tree: the name of the checkpointable in an Orbax checkpoint.

    Raises:
      FormatError: if the source is of no format that is read, or damaged.
      LayoutError: if the layout does not fit.
      ConfigError: if there are no rules to which sizes or a direction belong.
    """

    def __init__(self, job: Job) -> None:
        dtype = None if job.dtype is None else _floating(job.dtype)
        _check_options(job)
        self.checkpoint: Checkpoint = opening.open_checkpoint(job.source)
        self.job = job
        given = None if job.rules is None else given_layout(job, self.checkpoint)
        layout = given or default_layout.layout(self.checkpoint).with_values(
            self.checkpoint.values
        )
        self.lists = layout.lists
        self.tree = layout.tree
        self.matched: Matched = matching.moves(
            layout,
            self.checkpoint.tensors,
            self.checkpoint.axes,
            None,
        )
        self._moves: dict[str, list[Move]] = collections.defaultdict(list)
        self._fills: dict[str, list[Fill]] = collections.defaultdict(list)
        for move in self.matched.moves:
            self._moves[move.target].append(move)
        for fill in self.matched.fills:
            self._fills[fill.target].append(fill)
        targets = self.matched.targets.values()
        if dtype is not None:
            targets = [
                dataclasses.replace(each, dtype=dtype)
                if _is_floating(each.dtype)
                else each
                for each in targets
            ]
        self.targets: list[TargetTensor] = sorted(targets, key=self._place)

    @property
    def num_bytes(self) -> int:
        """The size of the values of all targets."""
        return sum(target.num_bytes for target in self.targets)

    @functools.cached_property
    def chunk_of(self) -> dict[str, tuple[int, ...]]:
        """The shape of the boxes in which each target is written, by name."""
        tensors = self.checkpoint.tensors
        # Boxes that are whole tensors lie in one piece in a file.
        times = _PLAIN_TIMES if self.job.to in ("safetensors", "hf") else 1
        return {
            target.name: chunks.chunk_shape(
                target,
                self._moves[target.name],
                tensors,
                chunk_bytes=times * chunks.CHUNK_BYTES,
            )
            for target in self.targets
        }

    @functools.cached_property
    def files(self) -> list[str]:
        """The files whose bytes are read, ordered."""
        return sorted({each.file for tensor in self._used for each in tensor.fragments})

    @functools.cached_property
    def _used(self) -> list[StoredTensor]:
        moves = self.matched.moves
        used = {source.tensor for move in moves for source in move.sources}
        return [self.checkpoint.tensors[number] for number in sorted(used)]

    def planned(self, needed: Needed) -> PlannedReads:
        """The plan of the reads of some boxes."""
        names = [target.name for target in needed]
        return PlannedReads.of_boxes(
            self.checkpoint,
            [move for name in names for move in self._moves[name]],
            [fill for name in names for fill in self._fills[name]],
            needed,
        )

    def read(
        self, needed: Needed, *, budget_bytes: int = BUDGET_BYTES, memory: ReusedMemory
    ) -> Generator[tuple[str, Box, np.ndarray], None, None]:
        """Yields boxes once they are complete, in any order.

        A caller that does not reach the end closes the generator.

        Args:
          needed: the boxes, by target; the checksums of their files were compared.
          budget_bytes: the most bytes of requests in flight, and the most bytes of
            boxes that are complete in part, or were yielded last; boxes that share a
            request, or a larger one, are read all the same.
          memory: of the values; the caller gives it back.

        Yields:
          The name of the target, the box, and its values.

        Raises:
          CheckpointError: if a file cannot be read or ends too early, or values that
            should be equal differ.
        """
        planned = self.planned(needed)
        transfer = Transfer(
            planned.plan,
            planned.sources().__getitem__,
            budget_bytes=budget_bytes,
            # The bytes of a box count until it was written.
            is_staged=lambda _: True,
            allocate=memory.take,
        )
        with contextlib.closing(transfer.buffers()) as buffers:
            for number, values in buffers:
                buffer = planned.plan.buffers[number]
                yield buffer.tensor.name, buffer.box, values
                del values
                transfer.free(number)

    def boxes_of(self, target: TargetTensor) -> list[Box]:
        """All boxes of a target, in C order; none if it has no elements."""
        return chunks.boxes_of(target, self.chunk_of[target.name])

    def _place(self, target: TargetTensor) -> tuple[int, str]:
        first = min((move.source for move in self._moves[target.name]), default=-1)
        return first, target.name


def config_directory(model: str) -> epath.Path:
    """The directory of a model that has a `config.json`; see `Job.config`.

    That of an adapter is its base's.

    Raises:
      ConfigError: if it has none.
      FormatError: if the cache lacks the model.
    """
    path = storage.absolute(opening.resolved(model))
    if (path / peft_adapter.CONFIG).exists():
        path = peft_adapter.base(path)
    if not (path / hugging_face.CONFIG).exists():
        raise errors.ConfigError(
            f"{model} has no {hugging_face.CONFIG}; give the directory of a model, or"
            " the id of one that was downloaded, hf://org/name, by --config"
        )
    return path


def _check_options(job: Job) -> None:
    if job.rules is not None:
        shipped_layouts.resolve(job.rules)
    elif job.sizes or job.is_reversed or job.only_weights:
        raise errors.ConfigError(
            "sizes, the reverse direction and the choice of weights are those of"
            " rules; give --rules"
        )


def given_layout(job: Job, checkpoint: Checkpoint) -> Layout:
    """The layout of a job that names one, with the values of a checkpoint.

    Raises:
      LayoutError: if the layout cannot be read, or has other sizes.
      ConfigError: if `config` is no model.
    """
    assert job.rules is not None
    layout = shipped_layouts.resolve(job.rules).with_sizes(job.sizes)
    layout = layout.inverse() if job.is_reversed else layout
    values = dict(checkpoint.values)
    if job.config is not None:
        path = config_directory(job.config) / hugging_face.CONFIG
        values |= hugging_face.config_values(path)
    layout = layout.with_values(values)
    return _of_weights(layout, checkpoint.tensors) if job.only_weights else layout


def _of_weights(layout: Layout, stored: Sequence[StoredTensor]) -> Layout:
    # Trees that no rule of the weights reads, such as that of the optimizer, are
    # dropped; what is left over in the others is an error, as usual.
    weights = layout.weights()
    first = weights.through[0] if weights.through else weights
    patterns = {
        # A rule of a kind has whole names.
        tensor.name if rule.kind else state.source.replace(PARAMETER, tensor.name)
        for rule in first.rules
        for tensor in rule.source
        for kind, state in first.states.items()
        if state.source is not None and state.target is not None
        if kind in (rule.states or (kind,))
    }
    trees = {pattern.partition("/")[0] for pattern in patterns if "/" in pattern}
    if any("{" in tree for tree in trees) or not trees:
        return weights
    others = {each.name for each in stored if each.name.partition("/")[0] not in trees}
    drop = tuple(map(name_pattern.glob_of, sorted(others)))
    first = dataclasses.replace(first, drop=(*first.drop, *drop))
    if not weights.through:
        return first
    return dataclasses.replace(weights, through=(first, *weights.through[1:]))


def _floating(name: str) -> np.dtype:
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(np.void)
    if not _is_floating(dtype):
        raise errors.ConfigError(
            f"{name!r} is no dtype of floating-point numbers; give bfloat16, float16 or"
            " float32"
        )
    return dtype


def _is_floating(dtype: np.dtype) -> bool:
    try:
        return ml_dtypes.finfo(dtype).dtype == dtype
    except ValueError:
        return False
