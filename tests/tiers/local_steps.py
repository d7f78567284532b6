"""Steps that hosts of one machine save, with copies as from a peer."""

import numpy as np

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, digest, storage
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.ram import step_writer

RUN = "run-7"


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


def save(host, step, *, only=None, save="0"):
    """Saves the state, or those of its leaves that `only` names, with a component."""
    captured = capture.capture(state(step), capture.Memory())
    contents = manifest.Contents(leaves=captured.leaves, components={"data": 1})
    if only is not None:
        captured.parts = tuple(p for p in captured.parts if p.leaf.path in only)
    writer = host.begin(StepId(step, save), contents, num_bytes=captured.num_bytes)
    writer.write(captured)
    storage.write_atomic(writer.directory / "data" / "0.json", cursors(step))
    (file,) = step_writer.written_files(writer.directory, ["data"])
    files = [manifest.ComponentFile(component="data", parts=(0, 1), **file._asdict())]
    return writer.commit(files)


def copies(host, step, values):
    """Adds copies of the leaf `params/w`, a row each, and a file, as from a peer."""
    captured = capture.capture(state(step), capture.Memory())
    contents = manifest.Contents(leaves=captured.leaves, components={"data": 1})
    writer = host.copy_writer(StepId(step, "0"), contents, num_bytes=1000)
    for row in range(4):
        put(writer, row, values[row : row + 1])
    writer.put_file(file_of_peer(step), cursors(step))
    return writer.commit()


def put(writer, row, values):
    """Adds a copy of a row of `params/w`, as from a peer."""
    content = values.reshape(-1).view(np.uint8)
    writer.put(row_fragment(row, values), lambda into: np.copyto(into, content))


def row_fragment(row, values):
    """A row of `params/w` at the peer."""
    return manifest.Fragment(
        leaf=1,
        box=boxes.Box(start=(row, 0), stop=(row + 1, 6)),
        digest=digest.values_digest(values),
        file="wherever",
        offset=0,
        stored_bytes=values.nbytes,
    )


def file_of_peer(step):
    """The file of the component `data` at the peer."""
    content = np.frombuffer(cursors(step), np.uint8)
    return manifest.ComponentFile(
        component="data",
        parts=(0, 1),
        path="data/0.json",
        digest=digest.values_digest(content),
        stored_bytes=content.nbytes,
    )
