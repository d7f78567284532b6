"""Backup hosts are pods of the same JobSet that stay while others are made anew."""

import argparse

import pytest

from elastic_ckpt.application import configured
from elastic_ckpt.cli import agent as agent_verb
from elastic_ckpt.config import load
from elastic_ckpt.core import errors
from tests.deploy import jobsets, manifest_check

BACKUP = "backup_h100"
TPU_JOBS = (
    "restart_strategy=restart_job",
    "enable_multi_tier_checkpointing=true",
    "backup_hosts=2",
    "peer_secret_file=/keys/a",
)


def jobs(*overrides):
    jobset = jobsets.only("JobSet", jobsets.documents(BACKUP, *overrides))
    return jobset, {
        each["name"]: each["template"]["spec"]
        for each in jobset["spec"]["replicatedJobs"]
    }


def backup_pod(*overrides):
    _, by_name = jobs(*overrides)
    return by_name["backup"]["template"]["spec"]


def test_the_programs_know_the_backup_hosts_by_the_names_of_their_pods(tmp_path):
    documents = jobsets.documents(BACKUP)
    path = tmp_path / "config.yml"
    path.write_text(jobsets.only("ConfigMap", documents)["data"]["config.yml"])
    _, peers, _ = configured.tiers(load.load(path), persistent=str(tmp_path))
    (container,) = backup_pod()["containers"]
    (port,) = (each["containerPort"] for each in container["ports"])
    # JobSet names a pod by these.
    names = [f"demo-backup-backup-0-{pod}.demo-backup" for pod in range(2)]
    assert peers.backups == tuple(f"http://{name}:{port}" for name in names)
    assert peers.copies == 0
    _, by_name = jobs()
    assert by_name["backup"]["completions"] == by_name["backup"]["parallelism"] == 2


def test_the_command_is_one_that_the_agent_takes():
    (container,) = backup_pod()["containers"]
    program, verb, *arguments = container["command"]
    assert (program, verb) == ("elastic-ckpt", "agent")
    parser = argparse.ArgumentParser()
    agent_verb.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    assert parsed.backup
    assert parsed.secret_file == "/etc/run-secret/secret"
    assert parsed.interface == "$(POD_IP)"
    assert "POD_IP" in {variable["name"] for variable in container["env"]}
    # Both have the secret, and a RAM disk below which the run is.
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert paths == {"/etc/run-secret", parsed.directory.rpartition("/")[0]}


def test_it_has_memory_and_no_accelerator():
    pod = backup_pod("spot=true", "program_cpus=8")
    (container,) = pod["containers"]
    memory = {"medium": "Memory", "sizeLimit": "800Gi"}
    assert memory in [volume.get("emptyDir") for volume in pod["volumes"]]
    assert container["resources"] == {
        "requests": {"memory": "804Gi"},
        "limits": {"memory": "804Gi"},
    }
    machine = {"node.kubernetes.io/instance-type": "m3-ultramem-32"}
    assert pod["nodeSelector"] == machine


def test_the_run_ends_with_its_program_and_failures_of_backup_hosts_do_not_end_it():
    jobset, by_name = jobs()
    success = jobset["spec"]["successPolicy"]
    assert success == {"operator": "All", "targetReplicatedJobs": ["hosts"]}
    backup = by_name["backup"]
    assert backup["backoffLimit"] == 2**31 - 1
    assert backup["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert "podFailurePolicy" not in backup


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["backup_machine_type=", "service_account=a", "prometheus_port=9400"],
        [f"peer_tls_{name}=/etc/run-secret/a" for name in ("certificate", "key", "ca")],
        ["gpu_direct=true"],
    ],
)
def test_every_form_of_it_is_a_valid_manifest(overrides):
    assert manifest_check.problems(jobsets.documents(BACKUP, *overrides)) == []


def test_with_slices_of_tpus_only_the_failed_slice_is_made_anew():
    documents = jobsets.documents(jobsets.TPU, *TPU_JOBS, local_checkpoint_period=5)
    assert manifest_check.problems(documents) == []
    pods = jobsets.pods(documents)
    assert pods.keys() == {"slice", "backup"}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (BACKUP, ["elastic_enabled=false"], "would be made anew"),
        (BACKUP, ["peer_secret_file="], "needs peer_secret_file"),
        (BACKUP, ["backup_size_limit=much"], "backup_size_limit='much' is not"),
        (BACKUP, ["peer_backup_urls=http://a:1"], "leave it empty"),
        (
            BACKUP,
            ["enable_multi_tier_checkpointing=false"],
            "no steps in memory for them to hold",
        ),
        (BACKUP, ["local_checkpoint_directory="], "cannot be mounted"),
        (jobsets.PATHWAYS, ["backup_hosts=1"], "would be made anew"),
    ],
)
def test_a_run_that_cannot_have_backup_hosts_is_refused(name, overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        jobsets.documents(name, *overrides)
