"""Work for the Python of an image, and its results in this one."""

import hashlib
import pathlib

import cloudpickle
import numpy as np
from elastic_ckpt_sidecar import host_agent, worker

from elastic_ckpt.data import data_keys
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.tiers import choices
from tests.sidecar import in_image

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = (
    *(
        f"elastic_ckpt/{room}"
        for room in ("core", "data", "steps", "tiers", "checkpoint/host")
    ),
    "sidecar",
)
SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    .removesuffix(".__init__")
    .removeprefix("sidecar.")
    for path in SOURCES
]
# A bridge to PyTorch's loader, for loops without a sidecar.
OUTSIDE = "elastic_ckpt.data.torch_dataset"


def write(directory: pathlib.Path, corpus: str) -> tuple[str, list[str]]:
    """Writes files of pickled workers, one for each engine, and of an agent.

    Returns:
      The files, and what the workers read here and the agent has.
    """
    files = []
    for num_logical_shards in (0, 4):
        data = pipeline.from_config(
            data_keys.DataKeys(
                grain_train_files=corpus,
                num_logical_shards=num_logical_shards,
                max_target_length=32,
                packing=num_logical_shards > 0,
            )
        )
        files.append(directory / f"worker_{num_logical_shards}")
        files[-1].write_bytes(cloudpickle.dumps((worker._HostWorker, data)))
    results = [in_image.work(file.read_bytes()) for file in files]
    assert len(set(results)) == 2
    tiers = [
        choices.Local(directory / "memory"),
        choices.Persistent(directory / "stored", every=1),
    ]
    choice = host_agent.HostChoice(
        number=0,
        device_ids=(0,),
        run="run",
        slice_name="0",
        directory=str(directory / "memory"),
        chosen=choices.Chosen.from_choices(tiers),
    )
    files.append(directory / "agent")
    files[-1].write_bytes(cloudpickle.dumps((host_agent._HostAgent, choice)))
    results.append(hashlib.sha256(np.arange(8, dtype=np.float32).tobytes()).hexdigest())
    return ",".join(map(str, files)), results


def command(python: str, files: str) -> list[str]:
    """The command that runs the workers of these files in an image."""
    modules = ",".join(set(MODULES) - {OUTSIDE})
    return [python, in_image.__file__, files, modules]
