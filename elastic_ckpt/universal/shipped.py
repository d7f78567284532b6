"""The layouts that ship with this package, by name: `hf_llama_to_maxtext`.

The README in `configs/layouts` lists these files. If the user passes no layout, a
DeepSpeed checkpoint is loaded by its own description of its shards, and an adapter is
merged into its base model. In other formats, whole tensors keep their names. If a
checkpoint has more than one kind of tensor, names begin with the kind, as in
`deepspeed_rules`: `first_moment/1.mlp.weight`.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Collection

from elastic_ckpt.universal.formats import deepspeed, deepspeed_rules, peft
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.rules.layout import (
    PARAMETER,
    Layout,
    LayoutError,
    Rule,
    State,
    TensorPattern,
)

_INSTALLED = pathlib.Path(__file__).parent / "layouts"
_IN_CHECKOUT = pathlib.Path(__file__).parents[2] / "configs" / "layouts"

_ANY = TensorPattern(name="{name:path}", dims="...")
# Copies each tensor to the target of the same name.
SAME_NAMES = Rule(source=(_ANY,), target=(_ANY,), place="the layout of the same names")


def directory() -> pathlib.Path:
    """The directory that contains the layout files."""
    return _INSTALLED if _INSTALLED.exists() else _IN_CHECKOUT


def names() -> list[str]:
    """The names of all layouts that ship with this package."""
    return sorted(path.stem for path in directory().glob("*.yml"))


@functools.cache
def load(name: str) -> Layout:
    """Loads a layout that ships with this package.

    Raises:
      LayoutError: if no layout has this name.
    """
    if name not in names():
        raise LayoutError(
            f"no layout is named {name!r}; choose one of "
            f"{', '.join(names())}, or specify the path of a layout file"
        )
    return Layout.load(directory() / f"{name}.yml")


def resolve(layout: Layout | str | os.PathLike[str]) -> Layout:
    """Resolves a user's choice: a layout, a file path, or a name.

    A string without a suffix or a directory is a layout's name.

    Raises:
      LayoutError: as `load` and `Layout.load`.
    """
    if isinstance(layout, Layout):
        return layout
    text = os.fspath(layout)
    is_path = os.path.splitext(text)[1] or os.path.dirname(text)
    return Layout.load(text) if is_path else load(text)


def default_layout(
    checkpoint: Checkpoint, targets: Collection[str] | None = None
) -> Layout:
    """The layout from a checkpoint's tensors to whole tensors with the same names.

    `targets` are the names of the target's tensors; None for all tensors that the
    layout makes.

    Raises:
      FormatError: if a DeepSpeed checkpoint's description is missing or invalid.
      LayoutError: if a checkpoint in any other format has per-rank shards or no
        tensors.
    """
    if checkpoint.format.startswith(peft.FORMAT):
        return load("lora")
    if checkpoint.format.startswith(deepspeed.FORMAT):
        return deepspeed_rules.layout(checkpoint, targets)
    tensors = checkpoint.tensors
    if not tensors or any(tensor.ranks for tensor in tensors):
        raise LayoutError(
            f"the {checkpoint.format} checkpoint has"
            f" {'per-rank shards' if tensors else 'no tensors'}; specify a layout for"
            " its model, or use a different checkpoint"
        )
    kinds = sorted({tensor.kind for tensor in tensors})
    is_plain = kinds == ["parameter"]
    return Layout(
        rules=(SAME_NAMES,),
        states={
            kind: State(
                source=PARAMETER,
                target=PARAMETER if is_plain else f"{kind}/{PARAMETER}",
            )
            for kind in kinds
        },
        place="the layout of the same names",
    )
