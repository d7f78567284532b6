"""The sidecar's part of a run, alone: what it imports, reads, keeps and restores.

A separate program that imports nothing of the tests: `in_image.py FILES MODULES`. A
file has the class of a worker and its data, or of an agent and its host, pickled as
colocated Python does it.
"""

import hashlib
import importlib
import json
import pathlib
import pickle
import sys
from importlib import abc
from typing import Any

# Not there in the image, or with nothing to do there.
ABSENT = (
    "optax",
    "orbax",
    "elastic_ckpt.checkpoint.checkpointer",
    "elastic_ckpt.checkpoint.components",
    "elastic_ckpt.checkpoint.hosts",
    "elastic_ckpt.cli",
    "elastic_ckpt.config",
    "elastic_ckpt.deploy",
    "elastic_ckpt.elastic",
    "elastic_ckpt.frontend",
    "elastic_ckpt.inspect",
    "elastic_ckpt.integrations",
    "elastic_ckpt.monitoring",
    "elastic_ckpt.training",
)


class Absent(abc.MetaPathFinder):
    """Fails every import of what the image does not have."""

    def find_spec(self, name, *_):
        if name.startswith(tuple(f"{absent}." for absent in ABSENT)) or name in ABSENT:
            raise ModuleNotFoundError(f"the image has no {name}", name=name)


def work(pickled: bytes) -> str:
    """A digest of what a worker reads, or an agent restores."""
    of_class, given = pickle.loads(pickled)  # noqa: S301
    if of_class.__module__ == "elastic_ckpt_sidecar.host_agent":
        return keep(of_class, given)
    assert of_class.__module__ == "elastic_ckpt_sidecar.worker"
    return read(given)


def keep(agent_class: type, choice: object) -> str:
    """The digest of an array that an agent restored from RAM, and from storage."""
    import jax
    import numpy as np
    from elastic_ckpt_sidecar import array_layout, host_agent, messages
    from elastic_ckpt_sidecar.host_arrays import HostArrays
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from elastic_ckpt.checkpoint.host import step_notes
    from elastic_ckpt.checkpoint.host.backup import HostBackup
    from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
    from elastic_ckpt.checkpoint.host.reader import HostReader
    from elastic_ckpt.checkpoint.host.saver import HostSaver
    from elastic_ckpt.checkpoint.host.step_search import StepSearch
    from elastic_ckpt.core import calls
    from elastic_ckpt.steps.step_id import StepId

    device = jax.devices()[0]
    over = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec("device"))
    agent = agent_class([choice])
    agent.connect(messages.encode({}, over))

    def ask(method: Any, *args: Any) -> Any:
        call = calls.of(method)
        encoded = call.encode(call.bind(*args))
        length = agent.begin(messages.encode({"call": 0, "method": encoded}, over))
        while length[0] == host_agent.UNDER_WAY:
            length = agent.lengths(messages.encode({"call": 0}, over))
        content = {"call": 0, "start": 0, "last": True}
        row = messages.rows(agent.answers(messages.encode(content, over)))
        answer = json.loads(row.tobytes())
        assert "answer" in answer, answer
        return call.decode_answer(answer["answer"])

    secret = ask(HostEndpoint.introduce).fresh_secret
    joined = ask(HostEndpoint.join, (0,), secret, None)
    ask(HostEndpoint.connect, (joined.host,), {})
    leaf = array_layout.PlacedLeaf(path="state/w", shape=(8,), dtype="float32", spec=())
    group = array_layout.Group(mesh=over.mesh, leaves=(leaf,))
    ask(HostArrays.describe, 0, (group.describe(),))
    array = jax.device_put(np.arange(8, dtype=np.float32), group.sharding(leaf))
    called = {"layout": 0, "group": 0}
    agent.hold(messages.encode({**called, "kept": False}, over), array)
    step_id = StepId(1, "0")
    ask(HostArrays.capture, step_id, 0)
    ask(HostSaver.write, step_id, (), None)
    notes = step_notes.StepNotes(
        metrics=None, custom_metadata=None, trees=None, parents=()
    )
    written = step_notes.WrittenStep(step_id=step_id, parts={}, notes=notes)
    ask(HostSaver.commit, written)

    def restored(tier: str) -> str:
        outcome = ask(StepSearch.find)
        assert outcome.checkpoint.step_id == step_id
        ask(HostReader.open_step, step_id)
        ask(HostArrays.select, 0, ())
        assert ask(HostReader.read).keys() == {tier}
        (array,) = agent.arrays(messages.encode(called, over))
        ask(HostReader.close_step)
        return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()

    digest = restored("local")
    ask(HostBackup.offer, step_id)
    ask(HostBackup.chunk_shapes, step_id)
    names = {leaf.path: ("state", "w")}
    ask(HostBackup.back_up, step_id, names)
    ask(HostBackup.commit, step_id, names, {})
    ask(HostSaver.remove, step_id.step)
    assert restored("persistent") == digest
    ask(HostEndpoint.close)
    return digest


def read(data: object) -> str:
    """The digest of the first batch of a worker's data."""
    from elastic_ckpt.data import rows

    alone = rows.Placement.in_order(0, num_hosts=1, global_batch_size=8)
    batch = next(data.host_batches(alone))
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(name.encode() + batch[name].tobytes())
    return digest.hexdigest()


def main(files: list[str], modules: list[str]) -> None:
    """Imports every module, and prints what each file's worker or agent has."""
    sys.meta_path.insert(0, Absent())
    for module in modules:
        importlib.import_module(module)
    for file in files:
        print(work(pathlib.Path(file).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(","))
