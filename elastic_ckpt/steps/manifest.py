"""Manifests: what one host holds of one step; only a manifest makes a part exist.

A host writes its manifest last and atomically, and anew when copies from peers have
arrived. It lists the whole step (every leaf, every component), so that parts that no
manifest holds are detected as missing. Then it lists the parts that this host holds:

* fragments, boxes of leaves with the digest of their values and their place in a file
* files of components (data state, random numbers, whatever a run has)

`manifest_file` reads and writes the format on disk.

Glossary: n fragments, r the most dims that a leaf has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import boxes
from elastic_ckpt.steps.step_id import StepId


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """An array of the state.

    Attributes:
      path: its place in the state's tree, unique in a step.
      shape: of the whole array.
      dtype: its name, such as `bfloat16`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a whole step, the same in the manifests of all hosts.

    Attributes:
      leaves: ordered by path.
      components: by name, the number of logical parts of each: the logical shards of
        the cursors, 1 of what all hosts share.
      time_ms: when it was committed, since 1970, by the clock of host 0.
      metrics: JSON of the metrics that retention may rank it by; None if it was not
        evaluated. It is kept as text, which is equal to itself also if a loss is NaN.
      parents: the steps, with their saves, from which the saves of its line went on,
        oldest first (see `line`); empty before the first restore.
      trees: JSON of the structure of the trees (FORMAT.md).
      custom_metadata: JSON of the user's metadata of the step; None if there is none.
      is_due: whether the step is due in persistent storage, so that a later world backs
        it up if this one cannot.
    """

    leaves: tuple[Leaf, ...]
    components: Mapping[str, int]
    time_ms: int = 0
    metrics: str | None = None
    parents: tuple[StepId, ...] = ()
    trees: str = "{}"
    custom_metadata: str | None = None
    is_due: bool = False

    @property
    def rank(self) -> int:
        """The most dims that a leaf has."""
        return self.shapes.shape[1]

    @functools.cached_property
    def shapes(self) -> np.ndarray:
        """The shapes of the leaves, padded with 1, int64 `[leaves, r]`."""
        rank = max((len(leaf.shape) for leaf in self.leaves), default=0)
        wide = [each.shape + (1,) * (rank - len(each.shape)) for each in self.leaves]
        return np.array(wide, np.int64).reshape(len(wide), rank)

    @functools.cached_property
    def has_dim(self) -> np.ndarray:
        """Whether a leaf has a dim, bool `[leaves, r]`."""
        ranks = np.array([len(leaf.shape) for leaf in self.leaves], np.int64)
        return np.arange(self.rank) < ranks[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, or its agent, that holds parts of steps.

    Attributes:
      id: lasts as long as its memory does; letters, digits and `._-`. In a RAM disk it
        is that of the machine's memory and a slot, `<machine>.<slot>`.
      number: that of its process when it saved; for people only.
      domains: the failure domains that it is in, by kind: `host` (the machine, if
        several agents share one), `rack`, `slice`, `zone`.
    """

    id: str
    number: int
    domains: Mapping[str, str]

    @property
    def machine(self) -> str:
        """The id of the machine's memory."""
        return self.id.rpartition(".")[0]

    @property
    def slot(self) -> str:
        """The slot that it has in the machine's RAM disk."""
        return self.id.rpartition(".")[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fragment:
    """A box of a leaf in one file.

    Attributes:
      leaf: its number in the contents.
      box: in global coordinates.
      digest: `core.digest.values_digest` of the values, 16 bytes.
      file: relative to the step's directory; behind `//`, a key of the key-value store
        that the file or directory before is.
      offset: of its first byte in the file.
      stored_bytes: from there on, as stored: compressed, maybe.
    """

    leaf: int
    box: boxes.Box
    digest: bytes
    file: str
    offset: int
    stored_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fragments:
    """Fragments as columns.

    Attributes:
      leaf: int32 `[n]`.
      boxes: `[n, r]`; of a leaf with fewer dims than r, the last are `0:1`.
      digest: uint64 `[n, 2]`, the 16 bytes of each as they lie in memory.
      file: int32 `[n]`, the number of the file in `files`.
      offset: int64 `[n]`.
      stored_bytes: int64 `[n]`.
      files: as in `Fragment`.
    """

    leaf: np.ndarray
    boxes: boxes.Boxes
    digest: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    stored_bytes: np.ndarray
    files: tuple[str, ...]

    @classmethod
    def from_rows(
        cls, fragments: Iterable[Fragment], *, contents: Contents
    ) -> Fragments:
        """Makes columns of `fragments`, sorted by leaf and box."""
        listed = sorted(fragments, key=lambda each: (each.leaf, each.box))
        files = tuple(sorted({each.file for each in listed}))
        numbers = {file: number for number, file in enumerate(files)}
        digests = b"".join(each.digest for each in listed)
        return cls(
            leaf=np.array([each.leaf for each in listed], np.int32),
            boxes=padded([each.box for each in listed], rank=contents.rank),
            digest=np.frombuffer(digests, np.uint64).reshape(-1, 2),
            file=np.array([numbers[each.file] for each in listed], np.int32),
            offset=np.array([each.offset for each in listed], np.int64),
            stored_bytes=np.array([each.stored_bytes for each in listed], np.int64),
            files=files,
        )

    def __len__(self) -> int:
        return len(self.leaf)

    def row(self, number: int, *, contents: Contents) -> Fragment:
        """One of them."""
        leaf = int(self.leaf[number])
        rank = len(contents.leaves[leaf].shape)
        return Fragment(
            leaf=leaf,
            box=self.boxes.box(number, rank=rank),
            digest=self.digest[number].tobytes(),
            file=self.files[self.file[number]],
            offset=int(self.offset[number]),
            stored_bytes=int(self.stored_bytes[number]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentFile:
    """A file of a component.

    Attributes:
      component: its name.
      parts: the first of the component's parts in this file, and the one after the
        last.
      path: relative to the step's directory.
      digest: `core.digest.values_digest` of its bytes, 16 bytes.
      stored_bytes: its length.
    """

    component: str
    parts: tuple[int, int]
    path: str
    digest: bytes
    stored_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """The parts of one step that one host holds.

    Attributes:
      run: the identity of the run.
      step: the training step.
      save: which save of this step it is, if a run that fell back came to it again;
        manifests of different saves are never mixed, and a later one's is greater.
      host: that holds it.
      contents: of the whole step.
      fragments: that the host holds.
      component_files: that the host holds.
    """

    run: str
    step: int
    save: str
    host: Host
    contents: Contents
    fragments: Fragments
    component_files: tuple[ComponentFile, ...]

    @property
    def step_id(self) -> StepId:
        """The step, and which save of it."""
        return StepId(self.step, self.save)

    @property
    def rows(self) -> list[Fragment]:
        """The fragments, one by one."""
        every = range(len(self.fragments))
        return [self.fragments.row(each, contents=self.contents) for each in every]

    @property
    def stored_bytes(self) -> int:
        """The bytes of all fragments and files that the host holds."""
        of_files = sum(file.stored_bytes for file in self.component_files)
        return int(self.fragments.stored_bytes.sum()) + of_files


def escaped(key: str) -> str:
    """A key of a tree as a part of a leaf's path, in which `/` joins the parts."""
    return key.replace("~", "~0").replace("/", "~1")


def padded(of_leaves: Sequence[boxes.Box], *, rank: int) -> boxes.Boxes:
    """Boxes of leaves with different numbers of dims; the missing dims are `0:1`."""
    more = [rank - len(box.start) for box in of_leaves]
    wide = [
        boxes.Box(start=box.start + (0,) * n, stop=box.stop + (1,) * n)
        for box, n in zip(of_leaves, more, strict=True)
    ]
    return boxes.Boxes.from_boxes(wide, rank=rank)
