"""Bases for Kustomize, and overlays that real `kubectl kustomize` builds."""

import re
import shutil
import subprocess

import pytest
import yaml

from elastic_ckpt.deploy import manifest, nodes
from elastic_ckpt.training import configured
from tests.deploy import jobsets, manifest_check

KUSTOMIZE = jobsets.SHIPPED / "kustomize"
IMAGE = "docker_image=us-docker.pkg.dev/my-project/my-images/elastic-ckpt:1"
NODE_AGENT = (
    *("hardware=cpu", "machine_type=", "elastic_enabled=false", IMAGE),
    *("node_agent_domain_labels=", "node_agent_size_limit="),
)
BACKUP = (
    *("backup_hosts=1", "backup_machine_type=", "backup_size_limit=64Gi", IMAGE),
    "run_name=demo-backup",
)
_REMEDY = (
    "no kubectl with Kustomize 5 on the PATH: install kubectl 1.27 or later, such as"
    " that of Debian 13: apt-get install -y kubernetes-client"
)


def backup_job(built):
    jobs = jobsets.only("JobSet", built)["spec"]["replicatedJobs"]
    return next(job for job in jobs if job["name"] == "backup")


def backup_base():
    """The backup hosts of a run as a JobSet of their own."""
    built = jobsets.documents("backup_h100", *BACKUP)
    jobset = jobsets.only("JobSet", built)
    return [
        {
            **jobset,
            "metadata": {**jobset["metadata"], "name": "demo-backup-hosts"},
            "spec": {
                "network": jobset["spec"]["network"],
                "replicatedJobs": [backup_job(built)],
            },
        }
    ]


def node_agent_base():
    return jobsets.documents("node_agent_h100", *NODE_AGENT, build=nodes.documents)


BASES = {
    "node-agent/base/node_agents.yaml": node_agent_base,
    "backup-hosts/base/backup_hosts.yaml": backup_base,
}


@pytest.mark.parametrize("path", BASES)
def test_a_base_is_what_the_templates_make(path, golden):
    built = BASES[path]()
    assert manifest_check.problems(built) == []
    golden(str(KUSTOMIZE / path), manifest.to_yaml(built))


def test_a_run_finds_backup_hosts_of_their_own_by_the_names_of_their_pods(tmp_path):
    (jobset,) = backup_base()
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    (port,) = (each["containerPort"] for each in container["ports"])
    url = f"http://{name}-{job['name']}-0-0.{name}:{port}"
    overrides = ["backup_hosts=0", "backup_size_limit=64Gi", f"peer_backup_urls={url}"]
    built = jobsets.documents("backup_h100", *overrides)
    config = jobsets.configured(built, tmp_path)
    _, peers, _ = configured.tiers(config, persistent=str(tmp_path))
    assert peers.backups == (url,)
    assert "backup" not in jobsets.jobs(built)


def kustomized(directory):
    program = shutil.which("kubectl")
    assert program, _REMEDY
    version = subprocess.check_output([program, "version", "--client"], text=True)
    assert int(re.search(r"Kustomize Version: v(\d+)", version)[1]) >= 5, _REMEDY
    built = subprocess.run(
        [program, "kustomize", str(KUSTOMIZE / directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    documents = list(yaml.safe_load_all(built.stdout))
    assert manifest_check.problems(documents) == []
    return documents


def by_kind(documents):
    return {document["kind"]: document for document in documents}


@pytest.mark.slow
@pytest.mark.parametrize("path", BASES)
def test_kustomize_builds_a_base_as_it_is(path):
    assert by_kind(kustomized(path.rpartition("/")[0])) == by_kind(BASES[path]())


@pytest.mark.slow
def test_the_overlay_of_the_agents_is_the_manifest_of_their_configuration():
    written = yaml.safe_load_all((jobsets.SHIPPED / "node_agents.yaml").read_text())
    assert by_kind(kustomized("node-agent/overlays/h100")) == by_kind(written)


@pytest.mark.slow
def test_the_overlay_of_backup_hosts_has_those_of_their_configuration():
    built = kustomized("backup-hosts/overlays/m3")
    assert backup_job(built) == backup_job(jobsets.documents("backup_h100"))
