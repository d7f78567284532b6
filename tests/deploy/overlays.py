"""Overlays of `configs/deploy`, as a user writes them, built by a real kubectl."""

import json
import pathlib
import shutil
import subprocess

import yaml

DEPLOY = pathlib.Path(__file__).parents[2] / "configs" / "deploy"
RUN = "steps: 1\n"


def built(directory):
    """What a real kubectl, 1.27 or later, builds of a directory."""
    ended = subprocess.run(
        ["kubectl", "kustomize", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return list(yaml.safe_load_all(ended.stdout))


def copied(root):
    """A copy of `configs/deploy` to write into."""
    directory = root / "deploy"
    return directory if directory.exists() else shutil.copytree(DEPLOY, directory)


def overlay(root, base, components=(), *, run=RUN):
    """A run of `base` with `components`."""
    directory = copied(root) / "mine"
    directory.mkdir(exist_ok=True)
    (directory / "run.yml").write_text(run)
    example = yaml.safe_load((DEPLOY / "example/kustomization.yaml").read_text())
    changed = {
        "resources": [f"../base/{base}"],
        "components": [f"../components/{each}" for each in components],
        "patches": [],
    }
    # JSON is YAML.
    (directory / "kustomization.yaml").write_text(json.dumps(example | changed))
    return built(directory)


def only(kind, documents, name="first-run"):
    (found,) = (
        each
        for each in documents
        if each["kind"] == kind and each["metadata"]["name"] == name
    )
    return found


def jobs(documents):
    """The Job of each replicated job of the run, by its name."""
    replicated = only("JobSet", documents)["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"] for job in replicated}


def program(documents):
    """The container of the program."""
    (container,) = (
        container
        for job in jobs(documents).values()
        for container in job["template"]["spec"]["containers"]
        if container["name"] == "train"
    )
    return container
