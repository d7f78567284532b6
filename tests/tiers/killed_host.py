"""Processes that are killed with SIGKILL at named moments of the local tier's work.

    python -m tests.tiers.killed_host DIRECTORY

For each point a process is forked that has step 1 committed, works on step 2 in
`DIRECTORY/<point>`, and kills itself there.
"""

import os
import pathlib
import signal
import sys

import numpy as np

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, digest, storage
from elastic_ckpt.steps import manifest, manifest_file
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.ram import local, ram_disk, step_writer
from elastic_ckpt.tiers.ram.chunk_files import ChunkWriter

RUN = "run-7"
OTHER = "ffff.0"


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


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def at(owner, name, *, before, call=1):
    """Kills this process before or after the given call of a function."""
    original = getattr(owner, name)
    left = [call]

    def wrapped(*arguments, **keywords):
        left[0] -= 1
        if before and not left[0]:
            kill()
        result = original(*arguments, **keywords)
        if not before and not left[0]:
            kill()
        return result

    setattr(owner, name, wrapped)


def begin(host):
    save(host, 2)


def add(host):
    save(host, 2, only={"params/b"})
    armed[0]()
    copies(host, 2, state(2)["params/w"])


def remove(host):
    save(host, 2)
    armed[0]()
    host.remove(StepId(2, "0"))


def clean(host):
    save(host, 2)
    storage.remove(host.disk.manifest_path(0, StepId(2, "0")))
    armed[0]()
    host.clean()


armed = [lambda: None]
# By point: what is done, what is watched, and the steps that are there afterwards.
POINTS = {
    "begin_before_it_is_reserved": (begin, storage, "write_atomic", True, 1, [1]),
    "begin_after_it_is_reserved": (begin, storage, "write_atomic", False, 1, [1]),
    "write_before_the_first_digest": (begin, digest, "values_digest", True, 1, [1]),
    "write_with_chunks_in_flight": (begin, digest, "values_digest", False, 3, [1]),
    "write_after_all_chunks": (begin, ChunkWriter, "write", False, 3, [1]),
    "write_with_a_component_half_written": (begin, os, "replace", True, 2, [1]),
    "commit_before_files_are_flushed": (begin, storage, "sync_tree", True, 1, [1]),
    "commit_before_the_manifest": (begin, manifest_file, "write", True, 1, [1]),
    "commit_with_the_manifest_half_written": (begin, os, "replace", True, 3, [1]),
    "commit_after_the_manifest": (begin, manifest_file, "write", False, 1, [1, 2]),
    "add_after_the_first_copy": (add, step_writer.StepWriter, "put", False, 1, [1, 2]),
    "add_before_the_file": (add, os, "replace", True, 2, [1, 2]),
    "add_before_the_manifest": (add, manifest_file, "write", True, 1, [1, 2]),
    "add_with_the_manifest_half_written": (add, os, "replace", True, 3, [1, 2]),
    "add_after_the_manifest": (add, manifest_file, "write", False, 1, [1, 2]),
    "remove_before_the_manifest": (remove, storage, "remove", True, 1, [1, 2]),
    "remove_after_the_manifest": (remove, storage, "remove", False, 1, [1]),
    "remove_with_files_half_gone": (remove, os, "unlink", False, 3, [1]),
    "remove_after_all": (remove, storage, "remove", False, 2, [1]),
    "clean_with_files_half_gone": (clean, os, "unlink", False, 2, [1]),
}


def run(directory, point):
    """Does what is done at a point until this process is killed."""
    work, owner, name, before, call, _ = POINTS[point]
    host = local.LocalHost(
        ram_disk.RamDisk(directory, run=RUN), slot=0, domains={}, number=0
    )
    save(host, 1)
    armed[0] = lambda: at(owner, name, before=before, call=call)
    if work is begin:
        armed[0]()
    work(host)


def main():
    (directory,) = sys.argv[1:]
    for point in POINTS:
        child = os.fork()
        if not child:
            run(pathlib.Path(directory) / point, point)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"{point} was not reached"
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    main()
