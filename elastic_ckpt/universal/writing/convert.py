"""Converts a checkpoint according to a layout.

    convert.convert(Job(source="model", target="run/persistent/0", rules="llama.yml"))

The new checkpoint becomes visible only when all of it is durable. If the process is
killed at any point, repeat the call to start from the beginning.

Targets are read and written a few boxes at a time, those that are near each other in
the sources. A target is cut first along the dim with the largest stride in its source
files, so that each part of a file goes to few boxes. A transposed matrix is therefore
cut into columns.

JAX and Orbax, which take seconds to import, are imported only to write Orbax
checkpoints.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, bucket_clients, errors, host_memory, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout as step_layout
from elastic_ckpt.universal import opening, shipped
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats import files, peft, weights
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, StoredTensor
from elastic_ckpt.universal.moves import Matched, Move, TargetTensor
from elastic_ckpt.universal.reading.arithmetic import stored_of
from elastic_ckpt.universal.reading.engine import Buffer, Reader
from elastic_ckpt.universal.rules import matching, names
from elastic_ckpt.universal.rules.layout import PARAMETER, Layout

_ROOM = "elastic_ckpt.universal.writing"
_DESTINATIONS = {
    "orbax": ("orbax_step", "OrbaxStep"),
    "safetensors": ("safetensors_files", "SafetensorsFiles"),
    "hf": ("safetensors_files", "HuggingFaceModel"),
}
# The memory for boxes that are being read or not yet written. Requests may use the same
# amount again.
_BUDGET_BYTES = 2**27
# Allocating a smaller buffer is as fast as finding one in the pool.
_LEAST_KEPT_BYTES = 2**18
# The factor by which boxes are larger in formats that store a tensor in one piece.
_PLAIN_TIMES = 4
# The size of a box in Orbax checkpoints.
CHUNK_BYTES = 2**24
# An order of cuts must not make more chunks than this multiple of the fewest.
_MOST_TIMES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A user's conversion request.

    Attributes:
      source: the path of a checkpoint in any supported format.
      target: the path to write to.
      rules: the path of a layout, or the name of a layout that ships with the package;
        None for the checkpoint's own layout (see `default_layout`).
      sizes: the sizes of dims that neither shapes nor the layout determine.
      is_reversed: whether to apply the layout's inverse.
      to: the format to write.
      config: a Hugging Face model whose `config.json` has values for the layout: a
        directory, or a model ID in the hub's local cache, `hf://org/name`.
      dtype: the dtype to cast floating-point tensors to; None to keep each dtype.
      only_weights: whether to omit the optimizer state and the step.
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
    """An open checkpoint and the tensors that a layout produces from it.

    Attributes:
      layout: the layout from the checkpoint's tensors to the targets.
      targets: the targets, ordered by where their sources are stored.

    Raises:
      FormatError: if the source is damaged, or not in a supported format.
      LayoutError: if the layout does not match the source.
      ConfigError: if options that need rules are set without rules, or values would be
        cast without their scales.
    """

    def __init__(self, job: Job) -> None:
        if job.dtype is not None and not _is_floating(job.dtype):
            raise errors.ConfigError(
                f"{job.dtype!r} is not a floating-point dtype; use bfloat16, float16"
                " or float32"
            )
        self.job = job
        self._free = host_memory.Pool()
        self.checkpoint: Checkpoint = opening.open_checkpoint(job.source)
        self.layout = given_layout(job, self.checkpoint)
        stored = self.checkpoint.tensors
        self.matched: Matched = matching.moves(
            self.layout, stored, self.checkpoint.axes, None
        )
        derived = [
            StoredTensor(name="", dtype=each.dtype, shape=each.shape)
            for each in self.matched.derived
        ]
        self._tensors = [*stored, *derived]
        self._moves: dict[str, list[Move]] = collections.defaultdict(list)
        for move in self.matched.moves:
            self._moves[move.target].append(move)
        targets = [_cast(each, job.dtype) for each in self.matched.targets.values()]
        first = {
            name: min(number for move in moves for number in self._stored(move))
            for name, moves in self._moves.items()
        }
        self.targets: list[TargetTensor] = sorted(
            targets, key=lambda each: (first.get(each.name, -1), each.name)
        )

    @property
    def num_bytes(self) -> int:
        """The total size of the targets' values."""
        return sum(target.num_bytes for target in self.targets)

    @functools.cached_property
    def reader(self) -> Reader:
        """The reader of the targets."""
        return Reader(
            self.checkpoint,
            self.matched,
            self.matched.targets,
            budget_bytes=_BUDGET_BYTES,
            # Allocating fresh memory takes longer than copying into it.
            allocate=lambda num_bytes: self._free.take(num_bytes),
        )

    @property
    def files(self) -> list[str]:
        """The sorted names of the files whose bytes are read."""
        moves = self.matched.moves
        used = {number for move in moves for number in self._stored(move)}
        return sorted({f.file for n in used for f in self._tensors[n].fragments})

    def chunk(self, target: TargetTensor) -> tuple[int, ...]:
        """The shape of the boxes in which a target is written."""
        # Only Orbax stores each box separately.
        times = 1 if self.job.to == "orbax" else _PLAIN_TIMES
        return chunk_shape(
            target,
            self._moves[target.name],
            self._tensors,
            chunk_bytes=times * CHUNK_BYTES,
        )

    def boxes(self, target: TargetTensor) -> list[Box]:
        """The boxes in which a target is written, in C order; none if it is empty."""
        if not target.num_bytes:
            return []
        return list(step_layout.cut(boxes.whole(target.shape), self.chunk(target)))

    def read(
        self, targets: Sequence[TargetTensor], *, like: TargetTensor | None = None
    ) -> Iterator[list[Buffer]]:
        """Yields the boxes of targets in batches.

        A batch's values may change once the next batch is requested.

        Args:
          targets: the targets to read, in this order.
          like: a target of the same shape whose boxes are used for all targets; None
            for each target's own boxes.

        Raises:
          CheckpointError: if no source or two sources fill an element, a file cannot be
            read, or values that should be identical differ.
          FormatError: if a file is truncated or its checksums cannot be read.
        """
        units = ((each, [box]) for each in targets for box in self.boxes(like or each))
        with contextlib.closing(self.reader.read(units)) as groups:
            for batch in groups:
                yield batch
                # Only one batch's memory is kept.
                self._free = host_memory.Pool()
                for each in batch:
                    if each.values.nbytes >= _LEAST_KEPT_BYTES:
                        self._free.release(each.values.reshape(-1).view(np.uint8))

    def _stored(self, move: Move) -> list[int]:
        return stored_of(self.matched, move.source, len(self.checkpoint.tensors))


class Destination(abc.ABC):
    """A checkpoint to write, in one format, at the path `target`.

    Raises:
      CheckpointError: if the format does not allow the tensors or the path.
    """

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        self.target = storage.absolute(conversion.job.target)
        if not conversion.targets:
            raise errors.CheckpointError(
                "there are no tensors to write; specify rules that match at least one"
            )

    @abc.abstractmethod
    def write(self) -> Generator[int]:
        """Writes the checkpoint durably and makes it visible at the end.

        First removes any files that a killed conversion left behind.

        Yields:
          The number of bytes written since the last yield, beginning with 0.

        Raises:
          CheckpointError: if the target exists, the source cannot be read, or storage
            fails.
          FormatError: if the source's checksums do not match.
          RunError: if a run is writing to the same place.
          OSError: if storage fails. Any of `bucket_clients.failures` is also possible.
        """

    def exists_already(self) -> errors.CheckpointError:
        """The error to raise if the target already exists."""
        return errors.CheckpointError(
            f"{self.target} already exists; remove it, or specify a different path"
        )


def destination_of(conversion: Conversion) -> Destination:
    """Creates the destination of a conversion.

    Raises:
      ConfigError: if the format is unknown.
      CheckpointError: if the format does not allow the targets.
    """
    to = conversion.job.to
    if to not in _DESTINATIONS:
        raise errors.ConfigError(
            f"cannot write the format {to!r}; choose one of {', '.join(_DESTINATIONS)}"
        )
    module, name = _DESTINATIONS[to]
    return getattr(importlib.import_module(f"{_ROOM}.{module}"), name)(conversion)


def convert(
    job: Job, *, progress: Callable[[int, int], None] = lambda *_: None
) -> Conversion:
    """Writes a checkpoint in the layout and format of another framework.

    Args:
      job: the conversion request.
      progress: a function that is called periodically with the number of bytes written
        and the total.

    Returns:
      The completed conversion.

    Raises:
      FormatError: if the source is damaged, or not in a supported format.
      LayoutError: if the layout does not match the source.
      CheckpointError: if the target exists, the source cannot be read, or storage
        fails.
      RunError: if another process is writing to the same directory.
    """
    conversion = Conversion(job)
    destination = destination_of(conversion)
    target, done = destination.target, 0
    lock = target.parent / f"{target.name}.lock"
    try:
        with storage.exclusive_lock(lock, target=str(target)):
            try:
                with contextlib.closing(destination.write()) as written:
                    for num_bytes in written:
                        done += num_bytes
                        progress(done, conversion.num_bytes)
            finally:
                # No other conversion can write to a target that exists.
                if storage.is_local(lock) and target.exists():
                    storage.remove(lock)
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"{str(target)!r} cannot be written ({error}); free up space, grant access"
            " to this path, or specify a different one, then convert again"
        ) from error
    return conversion


def config_directory(model: str) -> epath.Path:
    """The directory with a model's `config.json`; see `Job.config`.

    For an adapter, this is the base model's directory.

    Raises:
      ConfigError: if there is no `config.json`.
      FormatError: if the cache lacks the model.
    """
    path = storage.absolute(files.resolved(model))
    if (path / peft.CONFIG).exists():
        path = peft.base(path)
    if not (path / weights.CONFIG).exists():
        raise errors.ConfigError(
            f"{model} has no {weights.CONFIG}; set --config to a model directory or"
            " to a downloaded model's ID, hf://org/name"
        )
    return path


def given_layout(job: Job, checkpoint: Checkpoint) -> Layout:
    """A job's layout, with a checkpoint's values filled in.

    Raises:
      LayoutError: if the layout cannot be read or does not use the job's sizes.
      ConfigError: if `config` is not a model, or options that need rules are set
        without rules.
    """
    if job.rules is None:
        if job.sizes or job.is_reversed or job.only_weights:
            raise errors.ConfigError(
                "sizes, the reverse direction and weights-only conversion need a"
                " layout; specify --rules"
            )
        return shipped.default_layout(checkpoint).with_values(checkpoint.values)
    layout = shipped.resolve(job.rules).with_sizes(job.sizes)
    layout = layout.inverse() if job.is_reversed else layout
    values = dict(checkpoint.values)
    if job.config is not None:
        values |= weights.config_values(config_directory(job.config) / weights.CONFIG)
    layout = layout.with_values(values)
    return _of_weights(layout, checkpoint.tensors) if job.only_weights else layout


def _of_weights(layout: Layout, stored: Sequence[StoredTensor]) -> Layout:
    # Drops trees that no rule for weights reads, such as the optimizer's. Unmatched
    # tensors in other trees are still an error.
    weights = layout.weights()
    first = weights.through[0] if weights.through else weights
    patterns = {
        # A rule with a kind has complete names.
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


def _cast(target: TargetTensor, dtype: str | None) -> TargetTensor:
    if dtype is None or not _is_floating(target.dtype) or target.dtype == dtype:
        return target
    if target.dtype.itemsize == 1:
        raise errors.ConfigError(
            f"{target.name} is {target.dtype}, whose values are meaningless without"
            f" scales; to write {dtype}, use a layout that applies the scales (`times`"
            " and `dtype`, as in hf_fp8), or omit --dtype"
        )
    return dataclasses.replace(target, dtype=np.dtype(dtype))


def _is_floating(dtype: np.typing.DTypeLike) -> bool:
    try:
        made = np.dtype(dtype)
        return ml_dtypes.finfo(made).dtype == made
    except (TypeError, ValueError):
        return False


def chunk_shape(
    target: TargetTensor,
    moves: Sequence[Move],
    tensors: Sequence[StoredTensor],
    *,
    chunk_bytes: int,
) -> tuple[int, ...]:
    """The shape of a target's boxes, which divides the target's shape in each dim.

    A box has at most `chunk_bytes`, unless dims are prime. `moves` has all moves into
    the target.
    """
    if not target.num_bytes:
        return tuple(max(1, size) for size in target.shape)
    dims = range(len(target.shape))
    first = sorted(dims, key=lambda dim: -_advance(dim, moves, tensors))
    orders = [first, *([dim, *(d for d in first if d != dim)] for dim in first)]
    cuts = [_cut(target, order, chunk_bytes) for order in orders]
    most = _MOST_TIMES * max(1, target.num_bytes // chunk_bytes)
    return next((chunk for count, chunk in cuts if count <= most), min(cuts)[1])


def _cut(
    target: TargetTensor, order: Sequence[int], chunk_bytes: int
) -> tuple[int, tuple[int, ...]]:
    # The number and shape of the chunks if dims are cut in this order.
    shape = step_layout.chunk_shape(
        [target.shape[dim] for dim in order],
        item_bytes=target.dtype.itemsize,
        chunk_bytes=chunk_bytes,
    )
    size = dict(zip(order, shape, strict=True))
    chunk = tuple(size[dim] for dim in range(len(order)))
    return math.prod(target.shape) // math.prod(chunk), chunk


def _advance(dim: int, moves: Sequence[Move], tensors: Sequence[StoredTensor]) -> float:
    # The stride in bytes of a dim's outermost factor in a source; infinite if the dim
    # spans multiple sources.
    if len({move.target_side.start[dim] for move in moves}) > 1:
        return math.inf
    if not moves:
        return 0
    move = moves[0]
    tensor = tensors[move.source]
    strides = row_major(tensor.shape, tensor.dtype.itemsize)
    if tensor.fragments:
        strides = tensor.fragments[0].strides
    steps = [
        move.source_side.steps[factor] * strides[move.source_side.dims[factor]]
        for factor, along in enumerate(move.target_side.dims)
        if along == dim and move.source_side.dims[factor] >= 0
    ]
    return max(steps, default=0)
