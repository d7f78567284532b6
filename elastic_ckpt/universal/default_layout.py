"""The layout of a checkpoint for which none is given: its description, or its names.

A DeepSpeed checkpoint describes how its ranks share parameters. An adapter is merged
into its base, by a layout that ships. Tensors of other formats keep their names if they
are global. If there are several kinds of tensors, the kind comes first, as in
`deepspeed_rules`: `first_moment/1.mlp.weight`.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.formats import deepspeed, deepspeed_rules, peft
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, side
from elastic_ckpt.universal.rules.state import ONLY_PARAMETERS, PARAMETER, State

_WEIGHTS = "parameter"
# Each tensor becomes that of its name.
SAME_NAMES = Rule(
    source=side({"{name:path}": "..."}),
    target=side({"{name:path}": "..."}),
    place="the layout of the same names",
)


def layout(
    checkpoint: Checkpoint,
    targets: Collection[str] | None = None,
) -> Layout:
    """The layout from the tensors of a checkpoint to whole tensors of their names.

    Args:
      checkpoint: that is open.
      targets: the names of the target's tensors; None if they are those that the layout
        makes.

    Raises:
      FormatError: if the description of a DeepSpeed checkpoint is missing or wrong.
      LayoutError: if the tensors of another format are those of ranks, or there are no
        tensors.
    """
    if checkpoint.format.startswith(peft.FORMAT):
        return shipped_layouts.load("lora")
    if checkpoint.format.startswith(deepspeed.FORMAT):
        return deepspeed_rules.layout(checkpoint, targets)
    return _same_names(checkpoint)


def _same_names(checkpoint: Checkpoint) -> Layout:
    tensors = checkpoint.tensors
    if not tensors or any(tensor.ranks for tensor in tensors):
        raise LayoutError(
            f"the checkpoint of the format {checkpoint.format} has"
            f" {'shards of ranks' if tensors else 'no tensors'}, which only rules"
            " relate with whole tensors; give the layout of that model"
        )
    kinds = sorted({tensor.kind for tensor in tensors})
    states = {
        kind: State(source=PARAMETER, target=f"{kind}/{PARAMETER}") for kind in kinds
    }
    return Layout(
        rules=(SAME_NAMES,),
        states=ONLY_PARAMETERS if kinds == [_WEIGHTS] else states,
        place="the layout of the same names",
    )
