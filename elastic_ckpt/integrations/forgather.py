"""Reads checkpoints of Forgather's trainers, without torch.

A checkpoint is a directory: the weights (one file, or shards with an index), a file of
`torch.save` for each component and each process that saved it, `checkpoint_metadata.pt`
(the best checkpoints, the states of callbacks), and `checkpoint_manifest.json`, which
has the sharing pattern of each component. Older checkpoints have no manifest: there the
names of the files are all that is known.

    checkpoint = forgather.Checkpoint.open("output/checkpoint-500")
    weights = checkpoint.weights()
    optimizer = checkpoint.state("optimizer")  # one for all: GLOBAL, REPLICATED
    by_rank = checkpoint.states("rng")  # one each: PER_RANK, PER_GROUP, PER_NODE
    checkpoint.load_into({"trainer": ec.components.Component(trainer, "global")})

Forgather restores on the same number of processes alone, and names files of groups by
the rank within a group, which is 0 for each of them; here the state of a group is that
of its leader's rank, so that no group is taken for another.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.components import sharing
from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import (
    hugging_face,
    safetensors_file,
    source_files,
    torch_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget

if TYPE_CHECKING:
    from elastic_ckpt import components as ec_components

MANIFEST = "checkpoint_manifest.json"
METADATA = "checkpoint_metadata.pt"
# There are no weights: another program (a parameter server) has them.
_WITHOUT_WEIGHTS = ".forgather_no_model_weights"
_STATE_FILE = re.compile(
    r"(?P<key>.+?)_state(?:_group_(?P<group>.+?)(?:_grank_\d+)?|_node_(?P<node>\d+))?"
    r"(?:_rank_(?P<rank>\d+))?\.pt"
)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")


class Pattern(enum.Enum):
    """How a component is shared among the processes that saved it."""

    GLOBAL = "global"
    REPLICATED = "replicated"
    PER_RANK = "per_rank"
    PER_GROUP = "per_group"
    PER_NODE = "per_node"


# One file holds the state of every process.
_SHARED = (Pattern.GLOBAL, Pattern.REPLICATED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """A component of a checkpoint.

    Attributes:
      key: its name.
      pattern: how it is shared.
      group: the name of the process groups, of a PER_GROUP component.
      files: the names of its files: of a GLOBAL or REPLICATED component by 0; otherwise
        by the rank that saved it, which leads its group or node.
    """

    key: str
    pattern: Pattern
    group: str | None
    files: Mapping[int, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of Forgather; `open` makes it.

    Attributes:
      path: its directory.
      world_size: processes that saved it; None if it has no manifest.
      components: by key.
    """

    path: epath.Path
    world_size: int | None
    components: Mapping[str, Component]

    @classmethod
    def open(cls, path: epath.PathLike) -> Checkpoint:
        """Reads the manifest, and which files there are; no state.

        Raises:
          FormatError: if it is no checkpoint, or a file is missing that the manifest
            lists.
        """
        directory = epath.Path(path)
        if not directory.is_dir():
            raise FormatError(f"{path} is no directory of a checkpoint")
        names = sorted(each.name for each in directory.iterdir())
        files = _state_files(names)
        if MANIFEST not in names:
            if not files and not any(name in names for name in (*_INDEXES, *_SINGLE)):
                raise FormatError(f"{path} has no file of a checkpoint of Forgather")
            return cls(path=directory, world_size=None, components=_inferred(files))
        fields = source_files.read_json(directory / MANIFEST)
        try:
            world_size = fields["world_size"]
            listed = [
                _component(key, entry, files, directory / MANIFEST)
                for key, entry in fields["components"].items()
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{directory / MANIFEST} is no manifest of a checkpoint: {error!r}"
            ) from None
        return cls(
            path=directory,
            world_size=world_size,
            components={component.key: component for component in listed},
        )

    def state(self, key: str) -> Any:
        """The state of a component that all processes share, with NumPy arrays.

        Raises:
          FormatError: if there is no such component, or there is one for each process:
            `states` has those.
        """
        component = self._held(key)
        if component.pattern not in _SHARED:
            raise FormatError(
                f"{self.path}: {key} is {component.pattern.name}, one for each of"
                f" {sorted(component.files)}; `states` reads them, and a function of"
                " yours makes one of them"
            )
        return torch_file.read_arrays(self.path / component.files[0])

    def states(self, key: str) -> dict[int, Any]:
        """The states of a component, by the rank that saved each.

        Raises:
          FormatError: if there is no such component, or a file cannot be read.
        """
        budget = SourceBudget()
        return {
            rank: torch_file.read_arrays(self.path / file, budget)
            for rank, file in self._held(key).files.items()
        }

    def load_into(self, components: Mapping[str, ec_components.Component]) -> list[str]:
        """Sets components to the states of the same names, each under its pattern.

        States of ranks, nodes and groups are numbered in the order of the ranks that
        saved them, which is that of coordinates where ranks fill the mesh in its order.
        A component with another pattern, or another number of states, is set by its
        `on_resize`. None is set unless all could be read.

        Args:
          components: `ec.components` by name, such as `Replicated({})` for a scheduler;
            one that holds an object has its `set_state` or `load_state_dict` called.

        Returns:
          The names that were set: an optional component may be missing.

        Raises:
          CheckpointError: if a required component is missing, a file cannot be read, or
            a component has no rule for another number of states.
        """
        wanted = {
            key: component
            for key, component in components.items()
            if component.required or key in self.components
        }
        values = {key: self._values(key, wanted[key]) for key in wanted}
        for key, component in wanted.items():
            component.put(values[key])
        return list(wanted)

    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name, from all shards: stages of a pipeline are joined.

        Raises:
          FormatError: if there are none, or a shard is missing or lacks a weight.
        """
        for index in _INDEXES:
            if (self.path / index).exists():
                return self._sharded_weights(self.path / index)
        for single in _SINGLE:
            if (self.path / single).exists():
                return _weights_of(self.path / single)
        if (self.path / _WITHOUT_WEIGHTS).exists():
            raise FormatError(
                f"{self.path} was saved without weights, which a parameter server"
                " holds; read the components alone"
            )
        raise FormatError(f"{self.path} has no weights ({errors.first_of(_SINGLE)})")

    def metadata(self) -> dict[str, Any]:
        """The best checkpoints and the states of callbacks; empty if there is none.

        Raises:
          FormatError: if it cannot be read.
        """
        path = self.path / METADATA
        return torch_file.read_arrays(path) if path.exists() else {}

    def _values(self, key: str, component: ec_components.Component) -> Any:
        held, now = self._held(key), component.present()
        files = list(held.files.values())
        budget = SourceBudget()
        pattern = sharing.of_saved(held.pattern.value)
        is_same = pattern == now.pattern and len(files) == len(now.names)
        return component.of_states(
            key,
            pattern,
            now.names if is_same else files,
            read=lambda place: torch_file.read_arrays(self.path / files[place], budget),
        )

    def _held(self, key: str) -> Component:
        if key not in self.components:
            raise FormatError(
                f"{self.path} has no component {key!r}; it has"
                f" {sorted(self.components)}, and `weights` reads the model"
            )
        return self.components[key]

    def _sharded_weights(self, index: epath.Path) -> dict[str, np.ndarray]:
        shards, _ = hugging_face.read_index(index)
        weights: dict[str, np.ndarray] = {}
        budget = SourceBudget()
        for file, names in shards.items():
            held = _weights_of(self.path / file, budget)
            missing = [name for name in names if name not in held]
            if missing:
                raise FormatError(
                    f"{self.path / file} lacks {errors.first_of(missing)}, which"
                    f" {index.name} lists there"
                )
            weights |= {name: held[name] for name in names}
        return weights


def _weights_of(
    path: epath.Path, budget: SourceBudget | None = None
) -> dict[str, np.ndarray]:
    if not path.exists():
        raise FormatError(f"{path} is missing; copy the whole checkpoint")
    if path.suffix == ".safetensors":
        return safetensors_file.read(path)
    held = torch_file.read_arrays(path, budget)
    if not isinstance(held, dict) or not all(
        isinstance(array, np.ndarray) for array in held.values()
    ):
        raise FormatError(f"{path} is no state dict of weights")
    return held


@dataclasses.dataclass(frozen=True)
class _StateFile:
    name: str
    pattern: Pattern
    group: str | None
    rank: int


def _state_files(names: list[str]) -> dict[str, list[_StateFile]]:
    # By component; a name that is not Forgather's is another program's file.
    files: dict[str, list[_StateFile]] = {}
    for name in names:
        parts = _STATE_FILE.fullmatch(name)
        if parts is None:
            continue
        if parts["group"] is not None:
            pattern = Pattern.PER_GROUP
        elif parts["node"] is not None:
            pattern = Pattern.PER_NODE
        else:
            pattern = Pattern.PER_RANK if parts["rank"] else Pattern.GLOBAL
        file = _StateFile(name, pattern, parts["group"], int(parts["rank"] or 0))
        files.setdefault(parts["key"], []).append(file)
    return files


def _inferred(files: Mapping[str, list[_StateFile]]) -> dict[str, Component]:
    components = {}
    for key, held in files.items():
        patterns = {file.pattern for file in held}
        if len(patterns) > 1:
            raise FormatError(
                f"{key} has files of several patterns"
                f" ({errors.first_of(file.name for file in held)}), and there is no"
                f" {MANIFEST}; move those away that another run left"
            )
        components[key] = Component(
            key=key,
            pattern=held[0].pattern,
            group=held[0].group,
            files={file.rank: file.name for file in held},
        )
    return components


def _component(
    key: str,
    entry: Mapping[str, Any],
    files: Mapping[str, list[_StateFile]],
    manifest: epath.Path,
) -> Component:
    pattern, ranks, group = (
        Pattern(entry["sharing_pattern"]),
        entry["ranks"],
        entry.get("group_name"),
    )
    kind = Pattern.GLOBAL if pattern in _SHARED else pattern
    held = {
        file.rank: file.name
        for file in files.get(key, ())
        if file.pattern is kind and file.group == group
    }
    missing = [rank for rank in ranks if rank not in held]
    if missing:
        raise FormatError(
            f"{manifest} lists {key} ({pattern.name}) of the ranks"
            f" {errors.first_of(map(str, ranks))}, and the files of"
            f" {errors.first_of(map(str, missing))} are missing; copy the whole"
            " checkpoint"
        )
    # Another rank's file was left by an earlier save into this directory.
    chosen = {rank: held[rank] for rank in sorted(ranks)}
    return Component(key=key, pattern=pattern, group=group, files=chosen)
