"""What Kubernetes, JobSet and Kustomize make of a manifest's pods, agents and rules."""

import argparse
import re

import pytest

from elastic_ckpt.cli import agent as agent_verb
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import nodes
from elastic_ckpt.training import configured, machine_run
from tests.deploy import jobsets
from tests.deploy.jobsets import GPU, PATHWAYS, TPU

BACKUP, ELASTIC, NODE = "backup_h100", "elastic_h100", "node_agent_h100"


def parsed(job):
    """The options of the agent in a pod, and its container."""
    (container,) = job["template"]["spec"]["containers"]
    program, verb, *arguments = container["command"]
    assert (program, verb) == ("elastic-ckpt", "agent")
    parser = argparse.ArgumentParser()
    agent_verb.add_arguments(parser)
    return parser.parse_args(arguments), container


def test_a_pod_belongs_to_the_agents_of_one_kind_of_nodes():
    volume = ["local_checkpoint_volume=node_agent", "elastic_enabled=false"]
    gpu, tpu = (
        jobsets.only("DaemonSet", jobsets.documents(name, *of, build=nodes.documents))
        for name, of in ((NODE, []), (TPU, volume))
    )
    assert gpu["metadata"]["name"] != tpu["metadata"]["name"]
    for some, others in ((gpu, tpu), (tpu, gpu)):
        wanted = some["spec"]["selector"]["matchLabels"].items()
        assert wanted <= some["spec"]["template"]["metadata"]["labels"].items()
        assert not wanted <= others["spec"]["template"]["metadata"]["labels"].items()


def test_the_agent_of_a_node_takes_its_command():
    built = jobsets.documents(NODE, "node_agent_port=8477", build=nodes.documents)
    options, container = parsed(jobsets.only("DaemonSet", built)["spec"])
    assert options.node
    assert options.directory == "/local"
    assert options.port == 8477
    assert options.remove_unused_after == 24 * 3600
    assert options.max_bytes == 256 * 2**30
    assert options.domain_labels == "row=example.com/row"
    names = {f"$({variable['name']})" for variable in container["env"]}
    assert {options.interface, options.kubernetes_node} == names


def test_the_programs_know_the_backup_hosts_by_the_names_of_their_pods(tmp_path):
    built = jobsets.documents(BACKUP)
    config = jobsets.configured(built, tmp_path)
    _, peers, _ = configured.tiers(config, persistent=str(tmp_path))
    job = jobsets.jobs(built)["backup"]
    options, container = parsed(job)
    assert container["ports"] == [{"containerPort": options.port}]
    # JobSet names a pod by these.
    names = [f"demo-backup-backup-0-{pod}.demo-backup" for pod in range(2)]
    assert peers.backups == tuple(f"http://{name}:{options.port}" for name in names)
    assert peers.copies == 0
    assert job["completions"] == job["parallelism"] == 2
    assert options.backup
    assert options.secret_file == "/etc/run-secret/secret"
    assert options.interface == "$(POD_IP)"
    assert "POD_IP" in {variable["name"] for variable in container["env"]}
    # It has the secret, and a RAM disk below which the run is.
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert paths == {"/etc/run-secret", options.directory.rpartition("/")[0]}


def test_each_pod_with_a_supervisor_is_a_machine_with_its_own_address(tmp_path):
    command = 'command=[sh, -c, exec elastic-ckpt train "$ELASTIC_CKPT_CONFIG"]'
    for of in ((), (command,)):
        built = jobsets.documents(ELASTIC, *of)
        (job,) = jobsets.jobs(built).values()
        config = jobsets.configured(built, tmp_path)
        for pod in range(job["completions"]):
            # Kubernetes sets the first in the pods of an indexed Job.
            environment = {"JOB_COMPLETION_INDEX": str(pod), "POD_IP": f"10.0.0.{pod}"}
            place = machine_run.place(config, environment)
            assert place.num_machines == 4
            assert place.slices == range(pod, pod + 1)
            assert place.interface == f"10.0.0.{pod}"


# From kubernetes/pkg/controller/job/pod_failure_policy.go.
EXIT_MESSAGE = (
    "Container {container} for pod default/demo-0 failed with exit code {code} matching"
    " FailJob rule at index {index}"
)
CONDITION_MESSAGE = (
    "Pod default/demo-0 has condition {condition} matching FailJob rule at index"
    " {index}"
)
IN_PLACE = ("restart_strategy=in_place", "in_place_restart_image=registry/agent:1")
BY_JOB = ("restart_strategy=restart_job",)
PREEMPTED, WRONG = {"condition": "DisruptionTarget"}, {"code": errors.CONFIG_EXIT_CODE}
FAILED = {"code": 137}


def failed_job(job, code=None, condition=None):
    """The reason and message with which a pod's failure fails its Job, if it does."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        on_exit = rule.get("onExitCodes", {"values": []})
        types = [each["type"] for each in rule.get("onPodConditions", [])]
        if code not in on_exit["values"] and condition not in types:
            continue
        if rule["action"] == "Ignore":
            return None
        template = EXIT_MESSAGE if code else CONDITION_MESSAGE
        name = on_exit.get("containerName")
        message = template.format(
            container=name, code=code, condition=condition, index=index
        )
        return "PodFailurePolicy", message
    if job.get("backoffLimit") == 0:
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    return None


def action(jobset, failure):
    """The action of JobSet: of the first rule that matches, or a counted restart.

    None if the Job only replaces its pod.
    """
    failed = failed_job(
        jobset["spec"]["replicatedJobs"][0]["template"]["spec"], **failure
    )
    if failed is None:
        return None
    reason, message = failed
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule.get("onJobFailureReasons", [reason]) and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("name", "overrides", "after_preemption", "after_failure"),
    [
        (GPU, (), "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"),
        (PATHWAYS, (), "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"),
        (TPU, BY_JOB, "RestartJobAndIgnoreMaxRestarts", "RestartJob"),
        # Only the pod is replaced.
        (GPU, IN_PLACE, None, None),
        (ELASTIC, (), None, None),
    ],
)
def test_a_wrong_configuration_ends_the_run_and_other_failures_restart_what_they_should(
    name, overrides, after_preemption, after_failure
):
    jobset = jobsets.only("JobSet", jobsets.documents(name, *overrides))
    assert action(jobset, WRONG) == "FailJobSet"
    assert action(jobset, PREEMPTED) == after_preemption
    assert action(jobset, FAILED) == after_failure
    for job in jobset["spec"]["replicatedJobs"]:
        # Kubernetes has rules for pods that run once alone.
        spec = job["template"]["spec"]
        runs_once = spec["template"]["spec"]["restartPolicy"] == "Never"
        assert ("podFailurePolicy" in spec) == runs_once
