"""The sidecar's image has what the sidecar needs, and needs no more than it has."""

import ast
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import cloudpickle
import pytest
from elastic_ckpt_sidecar import worker

from elastic_ckpt.data import data_keys, rows
from elastic_ckpt.data.lm import pipeline

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
OUTSIDE = "elastic_ckpt.data.torch_loader"
DIRECTORY = ROOT / "sidecar"
DOCKERFILE = (DIRECTORY / "Dockerfile").read_text()
# Not imported by name: colocated Python's pickler, and the file system of gs://.
UNSEEN = {"cloudpickle", "gcsfs"}


def lines(path):
    text = path.read_text().splitlines()
    return [line for line in text if line and not line.startswith("#")]


def name_of(requirement):
    return re.match(r"[\w-]+", requirement).group().lower()


def pins(path):
    return dict(line.split("==") for line in lines(path) if ";" not in line)


def imported():
    """The distributions that the rooms of the image import."""
    of_module = importlib.metadata.packages_distributions()
    # A namespace of many distributions.
    of_module["google"] = ["protobuf"]
    modules = set()
    for path, module in zip(SOURCES, MODULES, strict=True):
        if module == OUTSIDE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names}:
                ours = name in ("elastic_ckpt", "elastic_ckpt_sidecar")
                if name not in sys.stdlib_module_names and not ours:
                    modules.add(of_module[name][0].lower().replace("_", "-"))
    return modules


def test_images_import_modules_that_are_there():
    named = re.findall(r'python -c "import (.*)"', DOCKERFILE)
    names = [name for each in named for name in each.split(", ")]
    assert "elastic_ckpt_sidecar.worker" in names
    assert all(map(importlib.util.find_spec, names))


def test_the_requirements_are_what_the_rooms_of_the_image_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # By a name that the configuration gives.
    tokenizers = project["optional-dependencies"]["tokenizers"]
    needed = imported() | UNSEEN | {name_of(line) for line in tokenizers}
    requirements = lines(DIRECTORY / "requirements.txt")
    assert {name_of(line) for line in requirements} == needed
    assert requirements == sorted(requirements)


def test_the_constraints_are_those_that_the_tests_run_with_and_the_jax_of_the_base():
    tested, here = pins(ROOT / "constraints.txt"), pins(DIRECTORY / "constraints.txt")
    (base_jax,) = re.findall(r"^FROM \S+/sidecar:\S+-jax_([\d.]+)", DOCKERFILE, re.M)
    assert here.pop("jax") == here.pop("jaxlib") == base_jax
    assert here.items() <= tested.items()


def test_the_head_has_every_extra_that_a_key_may_ask_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (installed,) = re.findall(r'"\.\[(\S+)\]"', DOCKERFILE)
    # `k8s` is chosen with the accelerator's JAX; `report` is for who looks at a run.
    extras = set(project["optional-dependencies"]) - {"k8s", "report"}
    assert set(installed.split(",")) == extras
    pinned = pins(DIRECTORY / "constraints.txt")
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            assert name_of(line) in pinned, line


def test_a_linter_finds_nothing_in_the_dockerfile():
    hadolint = pathlib.Path(sys.executable).parent / "hadolint"
    linted = subprocess.run(
        [hadolint, "--no-color", DIRECTORY / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")


def test_the_dockerfile_copies_what_there_is_and_ends_in_an_import():
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    last = DOCKERFILE.rstrip().splitlines()[-1]
    modules = "elastic_ckpt_sidecar.host_agent, elastic_ckpt_sidecar.worker"
    assert last.strip() == f'python -c "import {modules}"'


# Not there in the image, or with nothing to do there.
ABSENT = [
    "optax",
    "orbax",
    *(
        f"elastic_ckpt.{each}"
        for each in (
            *("checkpoint.checkpointer", "checkpoint.components", "checkpoint.hosts"),
            *("cli", "elastic", "frontend", "inspect", "integrations"),
            *("monitoring", "training"),
        )
    ),
]
WORKER = """
import importlib, pathlib, pickle, sys

class Absent:
    @staticmethod
    def find_spec(name, *_):
        if any(name == each or name.startswith(f"{each}.") for each in absent):
            raise ModuleNotFoundError(f"the image has no {name}", name=name)

file, modules, absent = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
sys.meta_path.insert(0, Absent)
for module in modules:
    importlib.import_module(module)
worker, data, place = pickle.loads(pathlib.Path(file).read_bytes())
assert worker.__module__ == "elastic_ckpt_sidecar.worker"
print(next(data.host_batches(place))["inputs"].tolist())
"""


@pytest.mark.slow
def test_without_orbax_and_the_command_line_a_worker_reads_the_same(corpus, tmp_path):
    data = pipeline.from_config(
        data_keys.DataKeys(
            grain_train_files=corpus,
            num_logical_shards=4,
            max_target_length=32,
            packing=True,
        )
    )
    place = rows.in_order(1, 8)[0]
    file = tmp_path / "worker"
    file.write_bytes(cloudpickle.dumps((worker._HostWorker, data, place)))
    modules = ",".join(set(MODULES) - {OUTSIDE})
    ended = subprocess.run(
        [sys.executable, "-c", WORKER, file, modules, ",".join(ABSENT)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    here = next(data.host_batches(place))["inputs"].tolist()
    assert ended.stdout == f"{here}\n"
