"""Manifests list the parts of a step that holders have; only listed parts exist.

A part is a box of a leaf, with the digest of its values. A component's file (data
state, RNG state) is also a leaf: the array of its bytes. A part's leaf, box and holder
determine where it is stored.

A manifest lists the whole step (every leaf, every component), so that missing parts are
detected, and the parts that its holders have. A single holder's manifest is a file in
the step directory, `manifest-<host id>`. It is written last and atomically, and
rewritten when copies from peers have arrived. Hosts exchange manifests of multiple
holders in the same format (FORMAT.md).

Glossary: n parts, r the maximum number of dims of a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# NumPy recognizes the name bfloat16 only after this import, even in an agent.
import ml_dtypes  # noqa: F401
import numpy as np
from etils import epath

from elastic_ckpt.core import (
    boxes,
    checked_blobs,
    checked_json,
    codec,
    errors,
    storage,
)
from elastic_ckpt.steps.step import StepId

VERSION = 1
# A host's memory is its own local tier and part of every other host's peer tier.
TierName = Literal["local", "persistent"]
# A host ID, and the name of the host's manifest in a step directory.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_NAME = re.compile(rf"manifest-{_ID.pattern}")
# Errors that decoding raises for content that is not a manifest.
_OTHER = (
    *(AttributeError, KeyError, IndexError, OverflowError),
    *(RecursionError, TypeError, ValueError),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """An array of the state, or a file of a component.

    Attributes:
      path: the unique path in the step, which is the checkpointable's name and the path
        in its tree; for a file, the path in the step directory.
      shape: the shape of the whole array; for a file, its length.
      dtype: the dtype's name, such as `bfloat16`; for a file, `uint8`.
      chunk: the shape of each part, at least 1 in each dim.
      is_file: whether the leaf is a component's file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...] = ()
    is_file: bool = False

    @classmethod
    def of_file(cls, path: str, num_bytes: int) -> Leaf:
        """A file of a component."""
        return cls(
            path=path,
            shape=(num_bytes,),
            dtype="uint8",
            chunk=(max(1, num_bytes),),
            is_file=True,
        )

    @property
    def checkpointable(self) -> str:
        """The name of the leaf's checkpointable."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """The name of an array in Orbax's stores, such as `params.w`."""
        _, *parts = self.path.split("/")
        return ".".join(part.replace("~1", "/").replace("~0", "~") for part in parts)

    def name_of(self, box: boxes.Box) -> str:
        """Names a part for messages: leaf and bounds, or a file path."""
        return self.path if self.is_file else f"{self.path}{box}"

    def num_bytes(self, box: boxes.Box) -> int:
        """The size of the values of a box."""
        return box.volume * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a whole step, which are the same in all of its manifests.

    Attributes:
      leaves: first the arrays, then the files of components, each ordered by path.
      components: the component names, ordered; a component may have no files.
      time_ms: when the step was committed, in milliseconds since 1970, by host 0's
        clock.
      metrics: the metrics that retention may rank the step by, as JSON text, which
        compares equal to itself even if a loss is NaN; None if the step was not
        evaluated.
      parents: the steps at which the step's line continued under a later save, oldest
        first (see `step.Line`); empty before the first restore.
      trees: the structure of the trees, as JSON text (FORMAT.md).
      custom_metadata: the user's metadata, as JSON text; None if there is none.
      is_due: whether the step was due to be saved to storage, or storage lacked an
        earlier step that was due; a later world backs up the step if this one cannot.
    """

    leaves: tuple[Leaf, ...]
    components: tuple[str, ...] = ()
    time_ms: int = 0
    metrics: str | None = None
    parents: tuple[StepId, ...] = ()
    trees: str = "{}"
    custom_metadata: str | None = None
    is_due: bool = False

    @functools.cached_property
    def arrays(self) -> tuple[Leaf, ...]:
        """The leaves that are arrays."""
        return tuple(leaf for leaf in self.leaves if not leaf.is_file)

    @functools.cached_property
    def files(self) -> Mapping[str, int]:
        """The index of each leaf that is a file, keyed by path."""
        return {leaf.path: n for n, leaf in enumerate(self.leaves) if leaf.is_file}

    @functools.cached_property
    def shapes(self) -> np.ndarray:
        """The leaf shapes, padded with 1, int64 `[leaves, r]`."""
        whole = [boxes.whole(leaf.shape) for leaf in self.leaves]
        rank = max((len(leaf.shape) for leaf in self.leaves), default=0)
        return boxes.Boxes.from_boxes(whole, rank=rank).stop

    def num_bytes(self, parts: Parts) -> np.ndarray:
        """The size of each part, int64 `[n]`."""
        of_leaf = [np.dtype(each.dtype).itemsize for each in self.leaves]
        return parts.boxes.volumes * np.array(of_leaf, np.int64)[parts.leaf]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host that holds parts of steps.

    Attributes:
      id: an ID that lasts as long as the host's memory; it consists of letters, digits
        and `._-`. On a RAM disk it is `<machine>.<slot>`: the ID of the machine's
        memory, and the slot.
      number: the process index at the time of the save; used only in messages.
      domains: the host's failure domains, by kind: `host` (the machine, if hosts share
        one), `rack`, `slice`, `zone`.
    """

    id: str
    number: int
    domains: Mapping[str, str]

    @property
    def machine(self) -> str:
        """The ID of the machine's memory."""
        return self.id.rpartition(".")[0]

    @property
    def slot(self) -> str:
        """The host's slot on the machine's RAM disk."""
        return self.id.rpartition(".")[2]


class Holder(NamedTuple):
    """A host that holds parts, and where it holds them.

    Attributes:
      url: the URL of the host's agent, or of the step directory in persistent storage;
        empty if the host's machine is in the world.
    """

    host: Host
    tier: TierName = "local"
    url: str = ""


class Parts(NamedTuple):
    """Parts as columns.

    Attributes:
      holder: the index of each part's holder, int64 `[n]`.
      leaf: the index of each part's leaf, int64 `[n]`.
      start: where each part's box starts, int64 `[n, r]`; 0 in dims that the leaf
        lacks.
      stop: where each part's box stops, int64 `[n, r]`; 1 in dims that the leaf lacks.
      digest: the 16 bytes of `core.digest.values_digest` of each part's values, uint64
        `[n, 2]`.
    """

    holder: np.ndarray
    leaf: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    digest: np.ndarray

    @classmethod
    def of_rows(
        cls, rows: Iterable[tuple[int, boxes.Box, bytes]], contents: Contents
    ) -> Parts:
        """Sorts one holder's parts; each row is a leaf, a box and a digest."""
        ordered = sorted(rows)
        held = boxes.Boxes.from_boxes(
            [box for _, box, _ in ordered], rank=contents.shapes.shape[1]
        )
        return cls(
            holder=np.zeros(len(ordered), np.int64),
            leaf=np.array([leaf for leaf, *_ in ordered], np.int64),
            start=held.start,
            stop=held.stop,
            digest=np.frombuffer(
                b"".join(each for *_, each in ordered), np.uint64
            ).reshape(-1, 2),
        )

    @property
    def boxes(self) -> boxes.Boxes:
        """The boxes of the parts."""
        return boxes.Boxes(start=self.start, stop=self.stop)

    def take(self, rows: np.ndarray) -> Parts:
        """The parts in `rows`."""
        return Parts(*(column.take(rows, axis=0) for column in self))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """The parts of one save of a step that some holders have.

    Attributes:
      step_id: the step and its save; manifests of different saves are never mixed.
    """

    run: str
    step_id: StepId
    contents: Contents
    holders: tuple[Holder, ...]
    parts: Parts

    @property
    def host(self) -> Host:
        """The first holder."""
        return self.holders[0].host

    def rows(self) -> list[tuple[int, boxes.Box, bytes]]:
        """Each part's leaf, box and digest."""
        ranks = [len(leaf.shape) for leaf in self.contents.leaves]
        held, digests = self.parts.boxes, self.parts.digest.tobytes()
        return [
            (leaf, held.box(n, rank=ranks[leaf]), digests[16 * n : 16 * n + 16])
            for n, leaf in enumerate(self.parts.leaf.tolist())
        ]

    def at(self, tier: TierName, url: str = "") -> Manifest:
        """The same manifest, marked as found in a tier or at an agent."""
        holders = tuple(Holder(each.host, tier, url) for each in self.holders)
        return dataclasses.replace(self, holders=holders)

    def to_bytes(self) -> bytes:
        """Encodes the manifest for `parse`."""
        contents = json.dumps(codec.encode(self.contents), separators=(",", ":"))
        holder, leaf, start, stop, digests = self.parts
        columns = np.vstack(
            [holder, leaf, start.T, stop.T, digests.view(np.int64).T], dtype="<i8"
        )
        return checked_blobs.to_bytes(
            {
                "run": self.run,
                "step_id": codec.encode(self.step_id),
                "holders": codec.encode(self.holders),
            },
            [contents.encode(), columns.tobytes()],
            version=VERSION,
        )

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """Decodes and checks what `to_bytes` encoded.

        Raises:
          UnreadableError: if the content is truncated or altered, has a different
            version, or is not a manifest.
        """
        fields, blobs = checked_blobs.parse(content, what="manifest", version=VERSION)
        try:
            contents = _contents(blobs[0])
            rank = contents.shapes.shape[1]
            columns = np.frombuffer(blobs[1], "<i8").reshape(2 * rank + 4, -1)
            parts = Parts(
                holder=columns[0],
                leaf=columns[1],
                start=columns[2 : 2 + rank].T,
                stop=columns[2 + rank : -2].T,
                digest=columns[-2:].T.view(np.uint64),
            )
            holders = codec.decode(tuple[Holder, ...], fields["holders"])
            inside = (parts.start >= 0) & (parts.start <= parts.stop)
            inside &= parts.stop <= contents.shapes[parts.leaf]
            _require(
                {
                    "the holders": bool(holders),
                    "the host IDs": all(
                        _ID.fullmatch(each.host.id) for each in holders
                    ),
                    "the boxes": inside.all(),
                    "the leaf and holder indices": all(
                        numbers.min(initial=0) > -1
                        and numbers.max(initial=-1) < len(of)
                        for numbers, of in (
                            (parts.leaf, contents.leaves),
                            (parts.holder, holders),
                        )
                    ),
                }
            )
            return cls(
                run=codec.decode(str, fields["run"]),
                step_id=codec.decode(StepId, fields["step_id"]),
                contents=contents,
                holders=holders,
                parts=parts,
            )
        except _OTHER as error:
            problem = f"is not a manifest ({error!r})"
            raise checked_json.UnreadableError(problem) from None

    @classmethod
    def merged(cls, manifests: Sequence[Manifest]) -> Manifest:
        """Merges at least one manifest into a manifest of all their holders.

        Raises:
          CheckpointError: if the manifests differ in run, step, save or contents.
        """
        first = manifests[0]
        for each in manifests:
            if not each.is_alike(first):
                raise errors.CheckpointError(
                    f"the manifest of host {each.host.id!r} (run {each.run!r}, step"
                    f" {each.step_id.step}, save {each.step_id.save!r}) lists a"
                    f" different step than the manifest of host {first.host.id!r} (run"
                    f" {first.run!r}, step {first.step_id.step}, save"
                    f" {first.step_id.save!r}); remove the manifest that does not"
                    " belong there"
                )
        before = np.cumsum([0, *(len(each.holders) for each in manifests)])
        several = [
            each.parts._replace(holder=each.parts.holder + number)
            for each, number in zip(manifests, before[:-1], strict=True)
        ]
        return dataclasses.replace(
            first,
            holders=tuple(holder for each in manifests for holder in each.holders),
            parts=Parts(*map(np.concatenate, zip(*several, strict=True))),
        )

    def is_alike(self, other: Manifest) -> bool:
        """Whether both list the same save of the same step, with the same contents."""
        # Parsed contents are usually the same object, so comparing them is immediate.
        own = (self.run, self.step_id, self.contents)
        return own == (other.run, other.step_id, other.contents)


def manifest_name(host_id: str) -> str:
    """The name of a host's manifest in a step directory."""
    return f"manifest-{host_id}"


def is_manifest_name(name: str) -> bool:
    """Whether `name` has the form of `manifest_name`."""
    return bool(_FILE_NAME.fullmatch(name))


def write_manifest(step_directory: epath.PathLike, saved: Manifest) -> None:
    """Writes a manifest, whose parts must already be durable."""
    path = os.path.join(step_directory, manifest_name(saved.host.id))
    storage.write_atomic(path, saved.to_bytes())


def read_manifest(path: epath.PathLike, *, run: str, step: int) -> Manifest:
    """Reads the host manifest at `path`.

    Args:
      path: the manifest's path, which ends with the host's `manifest_name`.
      run: the expected run.
      step: the expected step.

    Raises:
      LaterVersionError: if a later version of elastic_ckpt wrote the manifest.
      CheckpointError: if the manifest is missing, `parse` rejects it, or it has a
        different run, step or host. The parts that it lists are then treated as lost.
    """
    try:
        saved = Manifest.parse(storage.read_bytes(path))
        actual = (saved.run, saved.step_id.step, manifest_name(saved.host.id))
        if actual == (run, step, os.path.basename(path)):
            return saved
        problem = (
            f"belongs to run {saved.run!r}, step {saved.step_id.step} and host"
            f" {saved.host.id!r}, but run {run!r}, step {step} and the host in its name"
            " were expected"
        )
    except FileNotFoundError:
        problem = "is missing"
    except checked_json.LaterVersionError as error:
        raise checked_json.LaterVersionError(
            f"manifest {path} {error} or, to continue without this step, move its"
            " directory elsewhere"
        ) from None
    except checked_json.UnreadableError as error:
        problem = str(error)
    raise errors.CheckpointError(
        f"manifest {path} {problem}; its parts count as lost; restore it from a"
        " good copy, or remove it"
    )


def grouped(manifests: Iterable[Manifest]) -> list[list[Manifest]]:
    """Groups a step's manifests by save and contents, newest save first."""
    groups: list[list[Manifest]] = []
    for each in manifests:
        alike = next((group for group in groups if each.is_alike(group[0])), [])
        if not alike:
            groups.append(alike)
        alike.append(each)
    return sorted(groups, key=lambda group: group[0].step_id, reverse=True)


def escaped(key: str) -> str:
    """Escapes a tree key for a leaf's path, in which `/` joins keys."""
    return key.replace("~", "~0").replace("/", "~1")


@functools.lru_cache(maxsize=64)
def _contents(text: bytes) -> Contents:
    # Decoded once, because all hosts of a step have the same contents.
    contents = codec.decode(Contents, json.loads(text))
    places = [(leaf.is_file, leaf.path) for leaf in contents.leaves]
    names = [leaf.path.split("/") for leaf in contents.leaves if leaf.is_file]
    texts = (contents.metrics, contents.trees, contents.custom_metadata)
    _require(
        {
            "the order of the leaves": places == sorted(set(places)),
            "the shapes": all(
                len(leaf.shape) == len(leaf.chunk)
                and min([1, *leaf.chunk, *(size + 1 for size in leaf.shape)]) > 0
                and np.dtype(leaf.dtype).itemsize >= 0
                for leaf in contents.leaves
            ),
            # A peer's path must not leave the step directory.
            "the paths of files": not any({"", ".", ".."} & {*name} for name in names),
            "the components": {name[0] for name in names} <= {*contents.components},
            "the JSON texts": all(
                isinstance(json.loads(each or "{}"), dict) for each in texts
            ),
        }
    )
    return contents


def _require(checks: Mapping[str, Any]) -> None:
    for what, holds in checks.items():
        if not holds:
            raise ValueError(f"{what} must be valid")
