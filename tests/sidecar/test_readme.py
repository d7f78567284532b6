"""The page from a cluster to a run: its commands run, its names are true."""

import pathlib
import re
import shlex

import pytest
import yaml

from elastic_ckpt.config import keys
from elastic_ckpt.core import errors
from elastic_ckpt.data import compatibility
from tests import runs

DIRECTORY = pathlib.Path(__file__).parents[2] / "sidecar"
README = (DIRECTORY / "README.md").read_text()
LINES = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).splitlines()
JOBSET = list(
    yaml.safe_load_all(
        (DIRECTORY.parent / "configs/deploy/pathways_v6e.yaml").read_text()
    )
)[-1]


def test_every_command_of_ours_runs_as_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(DIRECTORY.parent / "configs")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for line in LINES if line.startswith("elastic-ckpt")]
    assert {command[1] for command in commands} == {"data", "manifest", "plan"}
    for _, *arguments in commands:
        assert runs.verb(*arguments) or (tmp_path / "job.yaml").exists()


def test_it_shows_how_to_build_to_apply_and_to_watch():
    shown = {" ".join(line.split()[:2]) for line in LINES}
    needed = {"docker build", "docker push", "kubectl apply", "kubectl get"}
    assert needed | {"kubectl logs", "kubectl delete"} <= shown
    tools = {line.split()[0] for line in LINES}
    assert tools == {"docker", "elastic-ckpt", "gcloud", "kubectl", "sbatch"}


def test_jobs_and_containers_that_it_names_are_those_of_the_manifest():
    jobs = {
        f"{JOBSET['metadata']['name']}-{job['name']}-0": job["template"]["spec"]
        for job in JOBSET["spec"]["replicatedJobs"]
    }
    logs = [line for line in LINES if line.startswith("kubectl logs")]
    for line in logs:
        job, container = re.search(r"job/(\S+) -c (\S+)", line).groups()
        pod = jobs[job]["template"]["spec"]
        every = [*pod["containers"], *pod["initContainers"]]
        assert container in [one["name"] for one in every]
    assert len(logs) == len(jobs)
    for line in LINES:
        if "jobset" in line.split():
            assert line.split()[-1] == JOBSET["metadata"]["name"]


def test_images_that_it_builds_are_those_that_the_examples_use():
    built = {re.search(r" -t (\S+)", line)[1] for line in LINES if " -t " in line}
    used = set()
    for path in (DIRECTORY.parent / "configs/deploy").glob("*.yml"):
        # The agent of JobSet is built in its repository.
        used |= set(re.findall(r"(?<!_restart_)image: (\S+)", path.read_text()))
    assert built == used


def test_it_shows_what_the_check_reports_of_other_versions():
    (shown,) = re.findall(r"elastic-ckpt train: (the hosts .*)", README)
    head, host = re.findall(r"(?:the head|host 0) \([^)]*\)", shown)
    facts = [{"host": head, "jax": "0.12.0"}, {"host": host, "jax": "0.10.0"}]
    with pytest.raises(errors.ConfigError) as raised:
        compatibility.check(facts)
    assert str(raised.value).startswith(shown + ". ")


def test_keys_that_it_names_exist():
    words = re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:=\S*)?`", README)
    assert len(words) > 15
    assert set(words) <= set(keys.keys())
