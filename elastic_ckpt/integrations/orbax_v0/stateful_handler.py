"""A `StatefulCheckpointable` of Orbax v1 as an item of v0's `CheckpointManager`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import v1

from elastic_ckpt.checkpoint import components, orbax_format
from elastic_ckpt.core import digest
from elastic_ckpt.host import verified_read
from elastic_ckpt.integrations.orbax_v0 import item_handler, step_manifests
from elastic_ckpt.manifests.manifest import ComponentFile, Contents


class StatefulHandler(item_handler.ItemHandler):
    """Saves and restores objects with the methods `save` and `load` of Orbax v1."""

    def begin(
        self, name: str, directory: epath.Path, item: Any
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """See `ItemHandler`; the hosts write their files into `directory`."""
        write = components.begin_save({name: item}, lambda _: directory)
        return write, lambda: _list(name, directory)

    def restore(self, directory: epath.Path, args: StatefulRestore) -> Any:
        """Moves the object to the saved state, on any number of hosts; returns it.

        Raises:
          CheckpointError: if a file is not what was saved.
          Exception: as `load` of the object.
        """

        def load() -> None:
            _verify(directory)
            components.load(args.item, directory)

        self.agreed(f"restore/{directory.name}", load)
        return args.item

    @classmethod
    def typestr(cls) -> str:
        """The name on disk, by which Orbax v1 finds its own handler."""
        return orbax_format.handler_name("StatefulCheckpointableHandler")


@ocp.args.register_with_handler(StatefulHandler, for_save=True)
@dataclasses.dataclass
class StatefulSave(ocp.args.CheckpointArgs):
    """Saves an object, for instance the iterator of `ec.batches`.

    Attributes:
      item: the object; its state is taken before `CheckpointManager.save` returns.
    """

    item: v1.StatefulCheckpointable


@ocp.args.register_with_handler(StatefulHandler, for_restore=True)
@dataclasses.dataclass
class StatefulRestore(ocp.args.CheckpointArgs):
    """Restores an object.

    Attributes:
      item: the object, which moves to the saved state.
    """

    item: v1.StatefulCheckpointable


def _list(name: str, directory: epath.Path) -> None:
    # Writes a manifest of the files of all hosts, which have written them.
    files = []
    pending = [(directory, f"{name}/")]
    while pending:
        parent, prefix = pending.pop()
        for child in parent.iterdir():
            if child.is_dir():
                pending.append((child, f"{prefix}{child.name}/"))
                continue
            content = np.frombuffer(child.read_bytes(), np.uint8)
            file = ComponentFile(
                component=name,
                parts=(len(files), len(files) + 1),
                path=prefix + child.name,
                digest=digest.values_digest(content),
                stored_bytes=content.nbytes,
            )
            files.append(file)
    contents = Contents(leaves=(), components={name: len(files)})
    step_manifests.write_of_item(directory, contents, files=files)


def _verify(directory: epath.Path) -> None:
    opened = step_manifests.open_step(directory.parent)
    if opened is None:
        return
    reader = verified_read.VerifiedReader(opened.sources)
    for offer in opened.step.holdings.offers:
        for file in offer.manifest.component_files:
            if file.component == directory.name:
                reader.file(file, [offer])
