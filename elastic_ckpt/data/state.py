"""The data state: where a run stands in its data, as one small checked file.

Version 1 is a JSON object in `data_state.json`:

* `version`: 1
* `engine`: the engine that wrote it, `"positional"`
* `position`: what the engine's iterator goes on from: `{"global_next_index": 960}`
* `pipeline`: what decides which example comes when, named by configuration keys
* `digest`: BLAKE2b-128 of the canonical JSON of all of the above

It says nothing of hosts or of the batch size: both may differ at resume.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from etils import epath

from elastic_ckpt.core import digest, errors, storage

FILE_NAME = "data_state.json"
VERSION = 1

# How `to_bytes` ends a file; inside it every closing brace is indented.
_END = b"\n}\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataState:
    """A position in the data of one pipeline.

    Attributes:
      engine: the engine's name.
      position: the engine's own state, JSON.
      pipeline: identity of the pipeline, from configuration key to JSON value.
    """

    engine: str
    position: dict[str, storage.Json]
    pipeline: dict[str, storage.Json]


def to_bytes(state: DataState) -> bytes:
    """The content of the state's file."""
    content: dict[str, storage.Json] = {
        "version": VERSION,
        "engine": state.engine,
        "position": state.position,
        "pipeline": state.pipeline,
    }
    content["digest"] = digest.json_digest(content)
    return json.dumps(content, indent=2).encode() + b"\n"


def write(directory: epath.PathLike, state: DataState) -> None:
    """Writes `state` into `directory`, whole or not at all."""
    storage.write_atomic(epath.Path(directory) / FILE_NAME, to_bytes(state))


def read(directory: epath.PathLike) -> DataState:
    """The state that `write` left in `directory`, checked.

    Raises:
      DataError: if the file is missing, cut short, not JSON, altered, or of a version
        that is not known; the message names the file and the way out.
    """
    path = epath.Path(directory) / FILE_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise _unreadable(path, "is missing") from None
    try:
        content = json.loads(text)
    except ValueError as error:
        began_well = text.startswith(b"{") or not text
        if began_well and not text.endswith(_END):
            what = f"is cut short (after {len(text)} bytes)"
        else:
            what = f"is not JSON ({error})"
        raise _unreadable(path, what) from None
    if not isinstance(content, dict) or "version" not in content:
        raise _unreadable(path, "is not a data state")
    if content["version"] != VERSION:
        raise errors.DataError(
            f"{path} has version {content['version']!r}, and this program reads version"
            f" {VERSION}; continue the run with the program that wrote it"
        )
    return _checked(path, content)


def check_same_pipeline(
    saved: DataState, engine: str, pipeline: dict[str, storage.Json]
) -> None:
    """Raises a DataError naming each part in which `saved` is of another pipeline."""
    before = saved.pipeline | {"engine": saved.engine}
    now = pipeline | {"engine": engine}
    changed = [
        f"{key}: saved {_shown(before.get(key))}, now {_shown(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise errors.DataError(
            "the data state was saved by another pipeline (" + "; ".join(changed) + ");"
            " set these keys back, or start a new run_name"
        )


def _checked(path: epath.Path, content: dict[str, Any]) -> DataState:
    body = {key: value for key, value in content.items() if key != "digest"}
    if digest.json_digest(body) != content.get("digest"):
        raise _unreadable(path, "was altered after it was saved (its digest differs)")
    return DataState(
        engine=body["engine"], position=body["position"], pipeline=body["pipeline"]
    )


def _unreadable(path: epath.Path, what: str) -> errors.DataError:
    step = path.parent.parent
    return errors.DataError(
        f"data state {path} {what}; restore the file from a copy, or move {step} out of"
        " its directory to continue from the step before"
    )


def _shown(value: storage.Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
