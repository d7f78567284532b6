"""The sidecar's part of a run, alone: what it imports, and a batch that it reads.

A program of its own, which knows nothing of the tests: `in_image.py FILES MODULES`. A
file has the class of a worker and its data, pickled as colocated Python does it.
"""

import hashlib
import importlib
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
    "elastic_ckpt.monitoring",
    "elastic_ckpt.training",
)


class Absent(abc.MetaPathFinder):
    """Fails every import of what the image does not have."""

    def find_spec(self, name, *_):
        if name.startswith(tuple(f"{absent}." for absent in ABSENT)) or name in ABSENT:
            raise ModuleNotFoundError(f"the image has no {name}", name=name)


def read(pickled: bytes) -> str:
    """The digest of the first batch of a worker's data."""
    worker, data = pickle.loads(pickled)  # noqa: S301
    assert worker.__module__ == "sidecar.worker"
    from elastic_ckpt.data import rows

    alone = rows.Placement.in_order(0, num_hosts=1, global_batch_size=8)
    batch = next(data.host_batches(alone))
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(name.encode() + batch[name].tobytes())
    return digest.hexdigest()


def main(files: list[str], modules: list[str]) -> None:
    """Imports every module, and prints what each file's worker reads."""
    sys.meta_path.insert(0, Absent())
    for module in modules:
        importlib.import_module(module)
    for file in files:
        print(read(pathlib.Path(file).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(","))
