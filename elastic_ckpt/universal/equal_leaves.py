"""The layout of a checkpoint that has the tensors of the target, and maybe others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.universal.default_layout import SAME_NAMES
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout import Layout


def layout_of(
    path: str, stored: Sequence[StoredTensor], targets: Mapping[str, TargetTensor]
) -> Layout:
    """The layout that takes each target from the tensor of its name, and drops others.

    Args:
      path: of the checkpoint, for messages.
      stored: its tensors.
      targets: by name.

    Raises:
      OtherModelError: if a tensor is missing, or has another shape.
    """
    shapes = {each.name: str(list(each.shape)) for each in stored}
    wanted = {name: str(list(each.shape)) for name, each in targets.items()}
    present = {name: shapes[name] for name in wanted.keys() & shapes.keys()}
    trees.check_same_model(path, present, wanted)
    dropped = (each.name for each in stored if each.name not in targets)
    drop = tuple(map(name_pattern.glob_of, dropped))
    return Layout(rules=(SAME_NAMES,), drop=drop, place=path)
