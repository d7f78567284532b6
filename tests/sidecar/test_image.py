"""The sidecar's image has what the sidecar needs, and needs no more than it has."""

import ast
import hashlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import cloudpickle
import numpy as np
import pytest
from elastic_ckpt_sidecar import colocated_tiers, host_agent, worker

from elastic_ckpt.config import schema
from elastic_ckpt.data import pipeline
from elastic_ckpt.tiers import choices
from tests.sidecar import in_image

ROOT = pathlib.Path(__file__).parents[2]
DIRECTORY = ROOT / "sidecar"
DOCKERFILE = (DIRECTORY / "Dockerfile").read_text()
ROOMS = (
    *(
        f"elastic_ckpt/{room}"
        for room in ("core", "config", "data", "manifests", "tiers", "host")
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


@pytest.fixture
def workers(corpus, tmp_path):
    """Files of pickled workers, one for each engine, and what they read here.

    And of an agent, and what it has.
    """
    files = []
    for num_logical_shards in (0, 4):
        data = pipeline.from_config(
            schema.DataSection(
                grain_train_files=corpus,
                num_logical_shards=num_logical_shards,
                max_target_length=32,
                packing=num_logical_shards > 0,
            )
        )
        files.append(tmp_path / f"worker_{num_logical_shards}")
        files[-1].write_bytes(cloudpickle.dumps((worker._HostWorker, data)))
    results = [in_image.work(file.read_bytes()) for file in files]
    assert len(set(results)) == 2
    choice = colocated_tiers.HostChoice(
        number=0,
        device_ids=(0,),
        run="run",
        slice_name="0",
        directory=str(tmp_path / "memory"),
        chosen=choices.Chosen.from_choices([choices.Local(tmp_path / "memory")]),
    )
    files.append(tmp_path / "agent")
    files[-1].write_bytes(cloudpickle.dumps((host_agent._HostAgent, choice)))
    results.append(hashlib.sha256(np.arange(8, dtype=np.float32).tobytes()).hexdigest())
    return ",".join(map(str, files)), results


def read_in(python, files, **options):
    """The results of the workers as the program of an image."""
    ended = subprocess.run(
        [python, in_image.__file__, files, ",".join(set(MODULES) - {OUTSIDE})],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def python_of_image():
    """A Python of the image's version, or else this one."""
    (version,) = set(re.findall(r"(?:python:|python_)(\d+\.\d+)", DOCKERFILE))
    beside_this = pathlib.Path(sys.base_prefix).parent.glob(f"{version}*/bin/python3")
    for python in (*beside_this, f"python{version}"):
        # A shim of pyenv may stand on the path without a Python behind it.
        works = [python, "-c", "pass"]
        if shutil.which(python) and not subprocess.run(works, check=False).returncode:
            return python
    return sys.executable


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
    # `k8s` is chosen with the accelerator's JAX.
    extras = set(project["optional-dependencies"]) - {"k8s"}
    assert set(installed.split(",")) == extras
    pinned = pins(DIRECTORY / "constraints.txt")
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            assert name_of(line) in pinned, line


def test_head_and_sidecar_have_the_same_python():
    versions = re.findall(r"^FROM \S*(?:python:|python_)(\d+\.\d+)", DOCKERFILE, re.M)
    assert len(versions) == 2
    assert len(set(versions)) == 1


def test_the_servers_of_pathways_are_of_the_same_jax_as_the_sidecar():
    deploy = schema.DeploySection()
    jax = pins(DIRECTORY / "constraints.txt")["jax"]
    assert deploy.server_image.endswith(f":jax-{jax}")
    assert deploy.proxy_server_image.endswith(f":jax-{jax}")


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


def test_without_orbax_and_the_command_line_workers_have_the_same_values(workers):
    files, read_here = workers
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert read_in(sys.executable, files, env=environment) == read_here


@pytest.mark.parametrize("absent", in_image.ABSENT)
def test_what_is_not_in_the_image_cannot_be_imported_there(absent):
    with pytest.raises(ModuleNotFoundError, match=f"the image has no {absent}"):
        in_image.Absent().find_spec(absent)


@pytest.mark.slow
def test_in_an_environment_built_as_the_image_workers_have_the_same_values(
    workers, tmp_path
):
    files, read_here = workers
    uv = shutil.which("uv")
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--python", python]
    listed = ["-r", DIRECTORY / "requirements.txt", "-c", DIRECTORY / "constraints.txt"]
    # As the Dockerfile does it, but for the constraints that its base brings.
    for command in (
        [uv, "venv", "--quiet", "--python", python_of_image(), environment],
        [*install, *listed],
        [*install, "--no-deps", ROOT],
    ):
        # Elsewhere, where uv does not find the constraints of pyproject.toml.
        subprocess.run(command, cwd=tmp_path, check=True)
    there = subprocess.run(
        [python, "-c", "import importlib.util as u; print(u.find_spec('orbax'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == "None\n"
    assert read_in(python, files, cwd=tmp_path) == read_here
