"""The sidecar's image has what the sidecar needs, and needs no more than it has."""

import ast
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests.sidecar import image_work

ROOT = pathlib.Path(__file__).parents[2]
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
    for path, module in zip(image_work.SOURCES, image_work.MODULES, strict=True):
        if module == image_work.OUTSIDE:
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


@pytest.mark.slow
def test_without_orbax_and_the_command_line_workers_have_the_same_values(
    corpus, tmp_path
):
    files, read_here = image_work.write(tmp_path, corpus)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        image_work.command(sys.executable, files),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == read_here
