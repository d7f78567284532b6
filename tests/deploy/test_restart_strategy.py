"""JobSet makes anew after a failure as `restart_strategy` asks."""

import pytest

from elastic_ckpt.core import errors
from tests.deploy import jobsets, manifest_check
from tests.deploy.test_failure_policy import failed_job

IMAGE = "in_place_restart_image=registry/in-place-restart-agent:0.11.0"
IN_PLACE = ("restart_strategy=in_place", IMAGE)


def job_of(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def policy(jobset):
    return jobset["spec"]["failurePolicy"]


@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.TPU])
def test_in_place_restarts_healthy_pods_and_replaces_failed_ones_singly(name):
    documents = jobsets.documents(name, *IN_PLACE)
    assert manifest_check.problems(documents) == []
    jobset = jobsets.only("JobSet", documents)
    assert policy(jobset)["restartStrategy"] == "InPlaceRestart"
    job = job_of(jobset)
    assert job["backoffLimit"] == 2147483647
    assert job["podReplacementPolicy"] == "Failed"
    spec = job["template"]["spec"]
    agent, program = (*spec["initContainers"], *spec["containers"])
    assert agent["image"] == IMAGE.partition("=")[2]
    assert agent["restartPolicy"] == "Always"
    assert agent["startupProbe"]["httpGet"]["path"] == "/barrier-is-down"
    for container, codes in ((agent, [0]), (program, [0, errors.CONFIG_EXIT_CODE])):
        exit_codes = {"operator": "NotIn", "values": codes}
        rule = {"action": "RestartAllContainers", "exitCodes": exit_codes}
        assert container["restartPolicyRules"] == [rule]


@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.TPU])
def test_in_place_a_preempted_pod_ends_no_job_and_a_wrong_configuration_the_run(name):
    jobset = jobsets.only("JobSet", jobsets.documents(name, *IN_PLACE))
    job = job_of(jobset)
    assert failed_job(job, condition="DisruptionTarget")[0] == "BackoffLimitExceeded"
    assert failed_job(job, code=errors.CONFIG_EXIT_CODE)[0] == "PodFailurePolicy"
    assert [rule["action"] for rule in policy(jobset)["rules"]] == ["FailJobSet"]


def test_the_agent_of_jobset_may_watch_its_jobset_and_annotate_its_pod():
    for name in (jobsets.GPU, jobsets.TPU):
        documents = jobsets.documents(name, *IN_PLACE)
        rules = jobsets.only("Role", documents)["rules"]
        allowed = {(r["resources"][0], verb) for r in rules for verb in r["verbs"]}
        assert {("pods", "patch"), ("jobsets", "watch")} <= allowed
        (subject,) = jobsets.only("RoleBinding", documents)["subjects"]
        pods = jobsets.roles(name, *IN_PLACE)["host"][0]
        assert pods["spec"]["serviceAccountName"] == subject["name"]


def test_restart_job_makes_the_failed_slice_anew():
    documents = jobsets.documents(jobsets.TPU, "restart_strategy=restart_job")
    assert manifest_check.problems(documents) == []
    rules = policy(jobsets.only("JobSet", documents))["rules"]
    assert [(rule["name"], rule["action"]) for rule in rules] == [
        ("configuration", "FailJobSet"),
        ("disruption", "RestartJobAndIgnoreMaxRestarts"),
        ("failure", "RestartJob"),
    ]
    # The last one matches every failure.
    assert rules[-1].keys() == {"name", "action"}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (jobsets.PATHWAYS, IN_PLACE, "enable_single_controller=true"),
        (jobsets.PATHWAYS, ("restart_strategy=restart_job",), "enable_single"),
        (jobsets.GPU, ("restart_strategy=restart_job",), "all hosts are one Job"),
        (jobsets.TPU, IN_PLACE[:1], "in_place_restart_image"),
    ],
)
def test_a_strategy_that_cannot_work_is_an_error(name, overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        jobsets.documents(name, *overrides)
