"""Every format that this library writes for itself, with a golden file.

`test_own_formats.py` runs the same attacks on each. Add a row for a new format.
"""

import base64
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt import steps as steps_room
from elastic_ckpt import training as training_room
from elastic_ckpt.checkpoint import components as components_room
from elastic_ckpt.checkpoint.components import component, encoding
from elastic_ckpt.core import checked_json, errors, process
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps.manifest import Contents, read_manifest
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import claims, orbax_view, persistent_root, records
from elastic_ckpt.tiers.persistent import run_files as beside_steps
from tests.tiers import saved_worlds

STEPS = pathlib.Path(steps_room.__file__).parent
COMPONENTS = pathlib.Path(components_room.__file__).parent
TRAINING = pathlib.Path(training_room.__file__).parent


class OwnFormat(NamedTuple):
    """A format of ours.

    Attributes:
      golden: A file in tests/golden.
      file: Its path below the directory that is written and read.
      value: What is in the golden file.
      write: Writes the value as the product does: the file, or its bytes.
      read: Reads a directory and returns the value, or raises an error that names the
        file.
      schema: Of its JSON, if it has one.
      page: Names each field.
      lost: What `read` returns of a file that is damaged, if that is no error.
    """

    golden: str
    file: str
    value: object
    write: Callable[[pathlib.Path], bytes | None]
    read: Callable[[pathlib.Path], object]
    schema: pathlib.Path | None = None
    page: pathlib.Path | None = None
    lost: object = None

    @property
    def is_json(self) -> bool:
        """Whether the file is JSON: the golden file of any other is base64."""
        return not self.golden.endswith(".txt")

    def written(self, directory: pathlib.Path) -> bytes:
        content = self.write(directory)
        return (directory / self.file).read_bytes() if content is None else content

    def golden_bytes(self, directory: pathlib.Path) -> bytes:
        """The content of the golden file."""
        content = (directory / self.golden).read_bytes()
        return content if self.is_json else base64.decodebytes(content)


def manifest():
    """What a host holds of a step: boxes of arrays, and a file."""
    whole = saved_worlds.contents({"b": [], "opt/m": [4], "w": [8, 9]}, files=2)
    parts = saved_worlds.grid([8, 9], [2, 2])
    held = [
        *((2, parts[3]), (0, saved_worlds.boxes.whole(())), (2, parts[1])),
        saved_worlds.file_of(whole, 1),
    ]
    whole = dataclasses.replace(
        whole,
        time_ms=1_790_000_000_123,
        metrics='{"loss":2.5}',
        parents=(StepId(20, "000000000000001"),),
        is_due=True,
    )
    host = saved_worlds.host(1, 2, 4)
    return saved_worlds.saved_by(host, whole, held, step=40)


DESCRIPTION = component.Description(
    pattern="per_group",
    axes=("data",),
    states=("group-model-0", "group-model-1"),
    hosts=4,
    kind="builtins.dict",
    on_resize="from_first",
    required=True,
)
STATE = {
    "lr": jnp.asarray(0.1),
    "ema": (np.array([1.5, -2.0], ml_dtypes.bfloat16), None),
    "steps": [3, True, "text", np.int64(7)],
}
IDENTITY = beside_steps.Identity(
    name="0123456789abcdef0123456789abcdef", is_stored=True
)
EVALUATION = beside_steps.Evaluation(
    run="run-7", step=40, save="000000000000003", metrics='{"loss":2}'
)
AGENTS = beside_steps.RunAgents(
    "run-7",
    {
        "host-01": beside_steps.Seen("http://10.0.0.1:9000", 1_790_000_000.5),
        "host-02": beside_steps.Seen("http://[::1]:9", 1_790_000_000.5),
    },
)
RECORD = run_files.RunRecord(
    run="run-7",
    program="train",
    steps_directory="/storage/run-7/checkpoints",
    every=20,
    at_end=True,
    ram=("/dev/shm/run-7", "/dev/shm/slice-0/run-7"),
    first_step=1,
    data={"global_batch_size": 8},
    settings={"global_batch_size": 8, "run_name": "run-7"},
)
CLAIM = records.Record(
    start="host-01-7-0123abcd",
    process=process.Process(
        host="host-01", pid=7, boot_id="b", pid_namespace="pid:[1]", start_ticks=3
    ),
    secs=60.0,
    since_ms=1_790_000_000_123,
    count=2,
    fields={
        "run": "run-7",
        "is_launched": True,
        "save": "000000000000003",
        "parents": [[4, "000000000000001"]],
        "begun_ms": 1_780_000_000_123,
    },
)
ORBAX_FILES = {"state/_METADATA": b"{}", "_CHECKPOINT_METADATA": b"[]"}


def _read_manifest(directory):
    path = directory / "manifest-host-01"
    return read_manifest(path, run="run-7", step=40).to_bytes()


def _read_state(directory):
    path = epath.Path(directory / "global.npz")
    return repr(encoding.decode(encoding.read(path)))


def _read_evaluations(directory):
    root = persistent_root.PersistentRoot.from_path(directory)
    line = Line(save="000000000000003", parents=())
    return beside_steps.evaluations(root, line, run="run-7")


def _read_listed(directory):
    for path, content in ORBAX_FILES.items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_bytes(content)
    view = orbax_view.OrbaxView(epath.Path(directory))
    for path, why in view.problems(Contents(leaves=())):
        raise errors.CheckpointError(f"{directory}/{path} {why}")
    return ORBAX_FILES


OWN = {
    "manifest": OwnFormat(
        golden="manifest_v1.txt",
        file="manifest-host-01",
        value=manifest().to_bytes(),
        write=lambda _: manifest().to_bytes(),
        read=_read_manifest,
        page=STEPS / "FORMAT.md",
    ),
    "component": OwnFormat(
        golden="component_v1.json",
        file=component.FILE,
        value=DESCRIPTION,
        write=lambda _: DESCRIPTION.to_bytes(),
        read=lambda directory: component.Description.read(epath.Path(directory)),
        schema=COMPONENTS / "schemas" / "component.json",
        page=COMPONENTS / "FORMAT.md",
    ),
    "state of a component": OwnFormat(
        golden="component_state_v1.txt",
        file="global.npz",
        value=repr(STATE),
        write=lambda path: encoding.write(path / "global.npz", encoding.encode(STATE)),
        read=_read_state,
    ),
    "record of a run": OwnFormat(
        golden="record_v1.json",
        file=run_files.RECORD,
        value=RECORD,
        write=lambda path: run_files.write(path, RECORD),
        read=run_files.read,
        page=TRAINING / "STEP_LOG.md",
    ),
    "identity of a run": OwnFormat(
        golden="run_v1.json",
        file=beside_steps.IDENTITY,
        value=IDENTITY,
        write=lambda path: beside_steps.keep(path, IDENTITY, is_first=True),
        read=lambda directory: beside_steps.steps_directory(directory).identity,
        page=STEPS / "FORMAT.md",
    ),
    "claim of a world": OwnFormat(
        golden="claim_v1.json",
        file="worlds/1.json",
        value=claims.Claim(
            number=1,
            run="run-7",
            line=Line(save="000000000000003", parents=((4, "000000000000001"),)),
            begun_ms=1_780_000_000_123,
        ),
        write=lambda _: records.to_bytes(CLAIM),
        read=claims.newest,
        page=STEPS / "FORMAT.md",
    ),
    "evaluation": OwnFormat(
        golden="evaluation_v1.json",
        file="evaluations/40-000000000000003.json",
        value=[(40, '{"loss":2}')],
        write=lambda path: beside_steps.record_evaluation(
            persistent_root.PersistentRoot.from_path(path), EVALUATION
        ),
        read=_read_evaluations,
        lost=[],
    ),
    "agents of a run": OwnFormat(
        golden="agents_v1.json",
        file=beside_steps.AGENTS,
        value=AGENTS,
        write=lambda path: beside_steps.write_agents(path, AGENTS),
        read=beside_steps.read_agents,
        page=STEPS / "FORMAT.md",
    ),
    "list of Orbax's files": OwnFormat(
        golden="orbax_digests_v1.json",
        file=orbax_view.FILE,
        value=ORBAX_FILES,
        write=lambda _: orbax_view.to_bytes(ORBAX_FILES),
        read=_read_listed,
    ),
}


def damages(content: bytes) -> dict[str, bytes]:
    """Files that are none, by what has happened to one."""
    places = range(0, len(content) - 1, max(1, len(content) // 40))
    spoilt = {f"cut at {end}": content[:end] for end in places}
    for place in places:
        flipped = bytes([content[place] ^ 1])
        spoilt[f"flipped at {place}"] = content[:place] + flipped + content[place + 1 :]
    return spoilt | {"twice": content + content, "zeros": bytes(len(content))}


def other_json(content: bytes) -> dict[str, bytes]:
    """JSON that is not of the format, or is of another version."""
    fields = json.loads(content)
    version = fields.pop("version")
    fields.pop("digest")
    return {
        "a list": b"[]",
        "an empty object": b"{}",
        "deep": b"[" * 10**5,
        "a later version": checked_json.to_bytes(fields, version=version + 1),
        "version 0": checked_json.to_bytes(fields, version=0),
    }


def with_unknown_field(content: bytes) -> bytes:
    """The file as a program might write it that knows one field more."""
    fields = json.loads(content)
    version = fields.pop("version")
    del fields["digest"]
    return checked_json.to_bytes({**fields, "unknown": [1]}, version=version)
