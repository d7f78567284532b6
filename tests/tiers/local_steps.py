"""Steps that hosts of one machine save, with copies as from a peer."""

import dataclasses

import numpy as np

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.step import StepId

RUN = "run-7"
FILE = "data/0.json"


def state(step):
    """The state at a step: three leaves."""
    return {
        "params/b": np.full(3, step, np.int8),
        "params/w": np.arange(24, dtype=np.float32).reshape(4, 6) * step,
        "step": step,
    }


def cursors(step):
    """The file of the component `data`."""
    return f'{{"row": {step}}}'.encode()


def contents(captured):
    """The contents of a step with what was captured, and a file."""
    return manifest.Contents(
        leaves=(*captured.leaves, manifest.Leaf.of_file(FILE, len(cursors(0)))),
        components=("data",),
    )


def save(host, step, *, only=None, save="0"):
    """Saves the state, or those of its leaves that `only` names, with a component."""
    captured = capture.capture(state(step), capture.Memory())
    whole = contents(captured)
    if only is not None:
        captured.parts = tuple(p for p in captured.parts if p.leaf.path in only)
    writer = host.begin(StepId(step, save), whole)
    writer.reserve(captured.num_bytes)
    content = cursors(step)
    writer.write(captured, {FILE: content})
    values = np.frombuffer(content, np.uint8)
    number, box = whole.files[FILE], boxes.whole(values.shape)
    writer.parts[number, box] = digest.values_digest(values)
    return writer.commit()


def copies(host, step, values):
    """Adds copies of the leaf `params/w`, a row each, and a file, as from a peer."""
    captured = capture.capture(state(step), capture.Memory())
    # The peer has cut it into rows.
    captured.parts = tuple(
        part._replace(leaf=dataclasses.replace(part.leaf, chunk=(1, 6)))
        if part.leaf.path == "params/w"
        else part
        for part in captured.parts
    )
    writer = host.copy_writer(StepId(step, "0"), contents(captured))
    writer.reserve(1000)
    for row in range(4):
        put(writer, row, values[row : row + 1])
    content = np.frombuffer(cursors(step), np.uint8)
    box = boxes.whole(content.shape)
    number = writer.manifest.contents.files[FILE]
    named = digest.values_digest(content)
    writer.put(number, box, named, lambda into: np.copyto(into, content))
    return writer.commit()


def put(writer, row, values):
    """Adds a copy of a row of `params/w`, as from a peer."""
    content = values.reshape(-1).view(np.uint8)
    named = digest.values_digest(values)
    writer.put(1, row_box(row), named, lambda into: np.copyto(into, content))


def row_box(row):
    """A row of `params/w`."""
    return boxes.Box(start=(row, 0), stop=(row + 1, 6))
