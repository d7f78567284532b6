"""The states of a component of a saved step, and edits of numbers in them.

A component has one state, or one for each host, node or group. Each is a file, whose
digest changes with the state; all other files of the component stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from elastic_ckpt.checkpoint import number_edit
from elastic_ckpt.checkpoint.components import description, state_file, state_numbers
from elastic_ckpt.checkpoint.components.encoding import Encoded
from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.checkpoint.number_edit import Change, Edit, Number
from elastic_ckpt.core import checked_json, digest, errors
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import ComponentFile


def read(
    holdings: Holdings, reader: verified_read.VerifiedReader, component: str
) -> dict[str, Encoded]:
    """The states of a component, by the paths of their files.

    Args:
      holdings: of the step.
      reader: of its files.
      component: the name of it.

    Raises:
      CheckpointError: if it is none of `ec.components`, or a file cannot be read.
    """
    items = {file.path: n for n, file in enumerate(holdings.files)}

    def content(path: str) -> bytes:
        item = items[path]
        offers = holdings.holders(len(holdings.leaf) + item)
        return reader.file(holdings.files[item], offers)

    own_description = f"{component}/{description.FILE}"
    if own_description not in items:
        raise errors.CheckpointError(
            f"component {component!r} has a file format of its own; only numbers in"
            " pytrees and in components of ec.components can be edited"
        )
    try:
        names = description.from_bytes(content(own_description)).states
        paths = [f"{component}/{description.state_name(name)}" for name in names]
        return {path: state_file.from_bytes(content(path)) for path in paths}
    except (KeyError, checked_json.UnreadableError, errors.CheckpointError) as error:
        raise errors.CheckpointError(
            f"component {component!r} cannot be read: {error}; run elastic-ckpt verify"
        ) from None


def changes(
    states: Mapping[str, Encoded], component: str, edits: Sequence[Edit]
) -> list[Change]:
    """The changes that edits make in all states of a component.

    Raises:
      CheckpointError: if a state lacks a number, or the new value is none of its type.
    """
    return [
        number_edit.change(_number(encoded, file, component, edit), edit)
        for edit in edits
        for file, encoded in states.items()
    ]


def edited(
    file: ComponentFile, content: bytes, changes: Sequence[Change]
) -> tuple[ComponentFile, bytes]:
    """A file of a step and its content, with those changes that are in it."""
    after = {
        each.path.partition("/")[2]: each.after
        for each in changes
        if each.file == file.path
    }
    if not after:
        return file, content
    encoded = state_numbers.replaced(state_file.from_bytes(content), after)
    content = state_file.to_bytes(encoded)
    checksum = digest.values_digest(np.frombuffer(content, np.uint8))
    file = dataclasses.replace(file, digest=checksum, stored_bytes=len(content))
    return file, content


def _number(encoded: Encoded, file: str, component: str, edit: Edit) -> Number:
    listed = state_numbers.numbers(encoded)
    path = "" if edit.path == number_edit.WHOLE else edit.path
    equal = [each for each in listed if each.path == path]
    if not equal:
        raise number_edit.missing(edit.path, file, [each.path for each in listed])
    if len(equal) > 1:
        raise errors.CheckpointError(
            f"{file} has {len(equal)} numbers with the path {path!r} (keys differ in"
            " their type, or contain slashes), so none of them is edited"
        )
    full = number_edit.full_path(component, edit)
    return Number(full, equal[0].dtype, equal[0].value, file)
