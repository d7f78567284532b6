"""Reads the components in Forgather's trainer checkpoints, without torch.

A checkpoint is a directory with the weights, which `ec.universal` reads, a `torch.save`
file for each component and each process that saved it, and `checkpoint_manifest.json`,
which lists each component's sharing pattern.

    checkpoint = forgather.Checkpoint.open("output/checkpoint-500")
    optimizer = checkpoint.state("optimizer")  # one for all: global, replicated
    by_rank = checkpoint.states("rng")  # one each: per_rank, per_group, per_node
    checkpoint.load_into({"trainer": ec.components.Component(trainer, "global")})

Forgather restores only on the same number of processes. Its file names identify a group
by the leader's rank within the group, which is always 0. This module uses the leader's
global rank, so that groups are not confused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import files, torch_file
from elastic_ckpt.universal.formats.files import FormatError

if TYPE_CHECKING:
    from elastic_ckpt import components as ec_components

MANIFEST = "checkpoint_manifest.json"
# The suffix of file names after the component's name, keyed by pattern.
_SUFFIXES = {
    "global": "",
    "replicated": "",
    "per_rank": "_rank_{rank}",
    "per_node": r"_node_\d+_rank_{rank}",
    "per_group": r"_group_{group}(_grank_\d+)?_rank_{rank}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """A component of a checkpoint.

    Attributes:
      pattern: the sharing pattern: `global`, `replicated`, `per_rank`, `per_group` or
        `per_node`.
      files: the names of the files that ranks saved, keyed by rank. For a group or
        node, the rank is the leader's; for a global or replicated component, it is 0.
    """

    pattern: str
    files: Mapping[int, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A Forgather checkpoint, returned by `open`."""

    path: epath.Path
    components: Mapping[str, Component]

    @classmethod
    def open(cls, path: epath.PathLike) -> Checkpoint:
        """Reads the manifest and lists the files, without reading any state.

        Raises:
          FormatError: if the manifest, or a file that it lists, is missing.
        """
        directory = epath.Path(path)
        manifest = directory / MANIFEST
        fields = files.read_json(manifest)
        names = sorted(each.name for each in directory.iterdir())
        try:
            components = {
                key: _component(key, entry, names, manifest)
                for key, entry in fields["components"].items()
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise FormatError(
                f"{manifest} is not a valid Forgather manifest ({error!r}); restore it"
                " from a good copy"
            ) from None
        return cls(path=directory, components=components)

    def state(self, key: str) -> Any:
        """Reads, with NumPy arrays, the state of a component that all processes share.

        Raises:
          FormatError: if there is no such component, or the component has multiple
            states, which `states` reads.
        """
        component = self._held(key)
        if _SUFFIXES[component.pattern]:
            raise FormatError(
                f"{self.path}: {key} is {component.pattern}, with a separate state for"
                f" each of the ranks {sorted(component.files)}; read the states with"
                " `states`, and merge them with your own function"
            )
        return self.states(key)[0]

    def states(self, key: str) -> dict[int, Any]:
        """Reads a component's states, keyed by the rank that saved each state.

        Raises:
          FormatError: if there is no such component, or a file cannot be read.
        """
        return {
            rank: torch_file.read_arrays(self.path / file)
            for rank, file in self._held(key).files.items()
        }

    def load_into(self, components: Mapping[str, ec_components.Component]) -> list[str]:
        """Restores each component from the saved state with the same name and pattern.

        The states of ranks, nodes and groups are ordered by the rank that saved them.
        This is the order of their mesh coordinates if ranks fill the mesh in order. If
        the pattern or number of states differs, the component's `on_resize` is called.
        If any state cannot be read, no component is restored.

        Args:
          components: components by name. If a component has an object, the object's
            `set_state` or `load_state_dict` is called.

        Returns:
          The names of the components that were restored; optional components may be
          missing.

        Raises:
          CheckpointError: if a required component is missing, a file cannot be read, or
            a component has no rule for a different number of states.
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

    def _values(self, key: str, component: ec_components.Component) -> Any:
        held, now = self._held(key), component.present()
        files = list(held.files.values())
        pattern = "per_host" if held.pattern == "per_rank" else held.pattern
        is_same = pattern == now.pattern and len(files) == len(now.names)
        return component.of_states(
            key,
            pattern,
            now.names if is_same else files,
            read=lambda place: torch_file.read_arrays(self.path / files[place]),
        )

    def _held(self, key: str) -> Component:
        if key not in self.components:
            raise FormatError(
                f"{self.path} has no component {key!r}, only"
                f" {sorted(self.components)}; to read the weights, use ec.universal"
            )
        return self.components[key]


def _component(
    key: str, entry: Mapping[str, Any], names: list[str], manifest: epath.Path
) -> Component:
    pattern, group = entry["sharing_pattern"], entry.get("group_name")
    files, missing = {}, []
    # Only listed ranks: an earlier save may have left other files in this directory.
    for rank in sorted(entry["ranks"]):
        place = {"rank": re.escape(str(rank)), "group": re.escape(str(group))}
        suffix = _SUFFIXES[pattern].format(**place)
        file = re.compile(rf"{re.escape(key)}_state{suffix}\.pt")
        found = next(filter(file.fullmatch, names), None)
        if found is None:
            missing.append(str(rank))
        else:
            files[rank] = found
    if missing:
        raise FormatError(
            f"{manifest} lists {key} ({pattern}), but the files of ranks"
            f" {errors.first_of(missing)} are missing; copy the checkpoint again, with"
            " all of its files"
        )
    return Component(pattern=pattern, files=files)
