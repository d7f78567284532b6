"""A planned conversion: a checkpoint, rules matched with it, and its targets."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout as step_layout
from elastic_ckpt.universal import opening, shipped
from elastic_ckpt.universal.formats import files, peft, weights
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, StoredTensor
from elastic_ckpt.universal.moves import Matched, Move, TargetTensor
from elastic_ckpt.universal.reading.planned_reads import PlannedReads
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.reading.transfer import Transfer
from elastic_ckpt.universal.rules import matching, names
from elastic_ckpt.universal.rules.layout import PARAMETER, Layout
from elastic_ckpt.universal.writing import chunks

# The boxes to read, by target.
Needed = Mapping[TargetTensor, Sequence[Box]]
# A box of a target, and its values.
Part = tuple[TargetTensor, Box, np.ndarray]
# Of the boxes that are complete in part, or were not yet written; of requests likewise.
# Boxes reuse as much memory: with fresh memory a conversion takes twice as long.
_BUDGET_BYTES = 2**27
# Of the boxes that are written at once.
_BATCH_BYTES = 2**26
# Of the targets that are planned at once.
_GROUP_BYTES = 5 * 10**9
# Plans and headers of files with so many targets are far below any limit.
_MOST_TARGETS = 100_000
_PLAIN_TIMES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A conversion, as a user requests it.

    Attributes:
      source: the path of a checkpoint of any format that is read.
      target: the path of the one to write.
      rules: the path of a layout, or the name of one that ships; None for that of the
        checkpoint, see `shipped.default_layout`.
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
      job: what is converted.
      checkpoint: that is open.
      layout: from its tensors to the targets.
      matched: the layout, matched with the checkpoint.
      targets: in the order in which their sources are stored.

    Raises:
      FormatError: if the source is of no format that is read, or damaged.
      LayoutError: if the layout does not fit.
      ConfigError: if there are no rules to which sizes or a direction belong.
    """

    def __init__(self, job: Job) -> None:
        if job.dtype is not None and not _is_floating(job.dtype):
            raise errors.ConfigError(
                f"{job.dtype!r} is no dtype of floating-point numbers; give bfloat16,"
                " float16 or float32"
            )
        self.job = job
        self._memory = ReusedMemory(_BUDGET_BYTES)
        self.checkpoint: Checkpoint = opening.open_checkpoint(job.source)
        self.layout = given_layout(job, self.checkpoint)
        self.matched: Matched = matching.moves(
            self.layout, self.checkpoint.tensors, self.checkpoint.axes, None
        )
        self._moves: dict[str, list[Move]] = collections.defaultdict(list)
        for move in self.matched.moves:
            self._moves[move.target].append(move)
        targets = [
            dataclasses.replace(each, dtype=np.dtype(job.dtype))
            if job.dtype is not None and _is_floating(each.dtype)
            else each
            for each in self.matched.targets.values()
        ]
        first = {
            name: min(move.source for move in moves)
            for name, moves in self._moves.items()
        }
        self.targets: list[TargetTensor] = sorted(
            targets, key=lambda each: (first.get(each.name, -1), each.name)
        )

    @property
    def num_bytes(self) -> int:
        """The size of the values of all targets."""
        return sum(target.num_bytes for target in self.targets)

    def chunk(self, target: TargetTensor) -> tuple[int, ...]:
        """The shape of the boxes in which a target is written."""
        # Boxes that are whole tensors lie in one piece in a file.
        times = 1 if self.job.to == "orbax" else _PLAIN_TIMES
        return chunks.chunk_shape(
            target,
            self._moves[target.name],
            self.checkpoint.tensors,
            chunk_bytes=times * chunks.CHUNK_BYTES,
        )

    @property
    def files(self) -> list[str]:
        """The files whose bytes are read, ordered."""
        tensors, moves = self.checkpoint.tensors, self.matched.moves
        used = {source.tensor for move in moves for source in move.sources}
        return sorted({each.file for n in used for each in tensors[n].fragments})

    def boxes(self, target: TargetTensor) -> list[Box]:
        """The boxes in which a target is written, in C order; none if it is empty."""
        if not target.num_bytes:
            return []
        return list(step_layout.cut(boxes.whole(target.shape), self.chunk(target)))

    def groups(self, most_bytes: int = _GROUP_BYTES) -> Iterator[Needed]:
        """All targets in order, dealt to groups that are read one after another.

        Args:
          most_bytes: of a group; a larger target is alone in one.
        """
        group: dict[TargetTensor, list[Box]] = {}
        num_bytes = 0
        for target in self.targets:
            is_full = num_bytes + target.num_bytes > most_bytes
            if group and (is_full or len(group) == _MOST_TARGETS):
                yield group
                group, num_bytes = {}, 0
            group[target] = self.boxes(target)
            num_bytes += target.num_bytes
        yield group

    def read(self, needed: Needed) -> Iterator[list[Part]]:
        """Yields boxes of targets in batches, in any order.

        The values of a batch may change once the next one is asked for.

        Raises:
          CheckpointError: if an element is filled by no source, or by two, a file
            cannot be read or ends too early, or values that should be equal differ.
        """
        matched = self.matched
        planned = PlannedReads.of_boxes(
            self.checkpoint, matched.moves, matched.fills, needed
        )
        transfer = Transfer(
            planned.plan,
            planned.sources().__getitem__,
            budget_bytes=_BUDGET_BYTES,
            # The bytes of a box count until it was written.
            is_staged=lambda _: True,
            allocate=self._memory.take,
        )
        buffers = planned.plan.buffers
        with contextlib.closing(transfer.buffers()) as complete:
            while batch := list(_batch(complete)):
                yield [
                    (buffers[number].tensor, buffers[number].box, values)
                    for number, values in batch
                ]
                for number, values in batch:
                    self._memory.give_back(values)
                    transfer.free(number)


def _batch(
    complete: Iterator[tuple[int, np.ndarray]],
) -> Iterator[tuple[int, np.ndarray]]:
    num_bytes = 0
    for number, values in complete:
        yield number, values
        num_bytes += values.nbytes
        if num_bytes >= _BATCH_BYTES:
            return


def config_directory(model: str) -> epath.Path:
    """The directory of a model that has a `config.json`; see `Job.config`.

    That of an adapter is its base's.

    Raises:
      ConfigError: if it has none.
      FormatError: if the cache lacks the model.
    """
    path = storage.absolute(files.resolved(model))
    if (path / peft.CONFIG).exists():
        path = peft.base(path)
    if not (path / weights.CONFIG).exists():
        raise errors.ConfigError(
            f"{model} has no {weights.CONFIG}; give the directory of a model, or"
            " the id of one that was downloaded, hf://org/name, by --config"
        )
    return path


def given_layout(job: Job, checkpoint: Checkpoint) -> Layout:
    """The layout of a job, with the values of a checkpoint.

    Raises:
      LayoutError: if the layout cannot be read, or has other sizes.
      ConfigError: if `config` is no model, or options are those of rules, and there are
        none.
    """
    if job.rules is None:
        if job.sizes or job.is_reversed or job.only_weights:
            raise errors.ConfigError(
                "sizes, the reverse direction and the choice of weights are those of"
                " rules; give --rules"
            )
        return shipped.default_layout(checkpoint).with_values(checkpoint.values)
    layout = shipped.resolve(job.rules).with_sizes(job.sizes)
    layout = layout.inverse() if job.is_reversed else layout
    values = dict(checkpoint.values)
    if job.config is not None:
        path = config_directory(job.config) / weights.CONFIG
        values |= weights.config_values(path)
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
    drop = tuple(map(names.glob_of, sorted(others)))
    first = dataclasses.replace(first, drop=(*first.drop, *drop))
    if not weights.through:
        return first
    return dataclasses.replace(weights, through=(first, *weights.through[1:]))


def _is_floating(dtype: np.typing.DTypeLike) -> bool:
    try:
        made = np.dtype(dtype)
        return ml_dtypes.finfo(made).dtype == made
    except (TypeError, ValueError):
        return False
