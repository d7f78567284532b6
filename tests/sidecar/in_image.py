"""The sidecar's part of a run, alone: what it imports, reads, keeps and restores.

A program of its own, which knows nothing of the tests: `in_image.py FILES MODULES`. A
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

# Not there in the image, or with nothing to do there.
ABSENT = (
    "optax",
    "orbax",
    "elastic_ckpt.checkpoint",
    "elastic_ckpt.cli",
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
    """The digest of an array that an agent saved, found, and restored."""
    import jax
    import numpy as np
    from elastic_ckpt_sidecar import array_layout, host_agent, letters
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    device = jax.devices()[0]
    over = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec("device"))
    agent = agent_class([choice])
    agent.meet(letters.letter({}, over))

    def ask(phase: str, *arguments: object) -> object:
        content = {"call": 0, "phase": phase, "arguments": arguments}
        length = agent.begin(letters.letter(content, over))
        while length[0] == host_agent.UNDER_WAY:
            length = agent.lengths(letters.letter({"call": 0}, over))
        content = {"call": 0, "start": 0, "last": True}
        row = letters.rows(agent.answers(letters.letter(content, over)))
        answer = json.loads(row.tobytes())
        assert "is" in answer, answer
        return answer["is"]

    secret = ask("world.introduce")["fresh_secret"]
    ask("world.meet", [ask("world.join", [0], secret)["host"]], {})
    leaf = array_layout.PlacedLeaf(path="w", shape=(8,), dtype="float32", spec=())
    group = array_layout.Group(mesh=over.mesh, leaves=(leaf,))
    ask("arrays.describe", 0, [group.to_json()])
    array = jax.device_put(np.arange(8, dtype=np.float32), group.sharding(leaf))
    called = {"layout": 0, "group": 0}
    agent.hold(letters.letter({**called, "kept": False}, over), array)
    ask("arrays.capture", 1, "0", 0)
    ask("saver.write", 1, "0", [], None)
    ask("saver.commit", 1, "0", {}, {"time_ms": 0, "metrics": None, "parents": []})
    found = ask("reader.find", None, [])["found"]
    ask("reader.open_step", found["step"], found["save"])
    ask("arrays.want", 0, [])
    ask("reader.read")
    (restored,) = agent.arrays(letters.letter(called, over))
    ask("close")
    return hashlib.sha256(np.asarray(restored).tobytes()).hexdigest()


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
