"""The description of a component beside its states: `component.json`.

It is a `checked_json` file that host 0 writes:

* `pattern`: how the component was shared
* `axes`: of the mesh, of a group
* `states`: the names of all states in their order; the file of one is `<name>.npz`
* `hosts`: how many hosts there were
* `kind`: the class of the state, for people
* `on_resize`, `required`: how it was declared, for people
"""

from __future__ import annotations

import dataclasses

from etils import epath

from elastic_ckpt.checkpoint.components import state_file
from elastic_ckpt.core import checked_json

FILE = "component.json"
VERSION = 1
_WHAT = "description of a component"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A component that was saved.

    Attributes:
      pattern: how it was shared.
      axes: of the mesh, of a group.
      states: the names of all states, in order.
      hosts: how many hosts there were.
      kind: the class of the state.
      on_resize: the rule that it was declared with, as `resize.name_of`. The program
        that loads it declares its own.
      required: whether it was declared as required.
    """

    pattern: str
    axes: tuple[str, ...]
    states: tuple[str, ...]
    hosts: int
    kind: str
    on_resize: str
    required: bool


def to_bytes(description: Description) -> bytes:
    """The content of the file."""
    return checked_json.to_bytes(dict(vars(description)), version=VERSION)


def from_bytes(content: bytes) -> Description:
    """The description in the content of a file.

    Raises:
      UnreadableError: as `checked_json.parse`.
    """
    fields = checked_json.parse(content, what=_WHAT, version=VERSION)
    return Description(
        pattern=fields["pattern"],
        axes=tuple(fields["axes"]),
        states=tuple(fields["states"]),
        hosts=fields["hosts"],
        kind=fields["kind"],
        on_resize=fields["on_resize"],
        required=fields["required"],
    )


def read(directory: epath.Path) -> Description:
    """The description of the component that was saved in a directory.

    Raises:
      CheckpointError: if it is missing or cannot be read; it names the file.
    """
    path = directory / FILE
    try:
        return from_bytes(path.read_bytes())
    except FileNotFoundError:
        problem = "is missing"
    except checked_json.UnreadableError as error:
        problem = str(error)
    raise state_file.unreadable(path, problem)


def state_path(directory: epath.Path, name: str) -> epath.Path:
    """The file of the state with a name."""
    return directory / state_name(name)


def state_name(name: str) -> str:
    """The name of the file of a state."""
    return f"{name}.npz"
