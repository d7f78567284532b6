"""Pods with elastic supervisors: each is a machine, and they are replaced singly."""

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.training import listeners, load, machine_run
from tests.deploy import jobsets, manifest_check

ELASTIC = "elastic_h100"


def job_of(*overrides):
    jobset = jobsets.only("JobSet", jobsets.documents(ELASTIC, *overrides))
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return jobset, replicated, replicated["template"]["spec"]


def slices_and_hosts(slices, hosts):
    return [f"slices={slices}", f"hosts={hosts}"]


def config_of(directory, *overrides):
    """The configuration that a pod reads."""
    config_map = jobsets.only("ConfigMap", jobsets.documents(ELASTIC, *overrides))
    path = directory / "config.yml"
    path.write_text(config_map["data"]["config.yml"])
    return load.load(path)


def test_each_pod_is_a_machine_with_its_own_address(tmp_path):
    _, replicated, job = job_of()
    assert replicated["replicas"] * job["completions"] == 4
    config = config_of(tmp_path)
    for pod in range(4):
        # Kubernetes sets the first in the pods of an indexed Job.
        environment = {"JOB_COMPLETION_INDEX": str(pod), "POD_IP": f"10.0.0.{pod}"}
        place = machine_run.place(config, environment)
        assert place.num_machines == 4
        assert place.slices == range(pod, pod + 1)
        assert place.interface == f"10.0.0.{pod}"
    assert job["completionMode"] == "Indexed"
    (container,) = job["template"]["spec"]["containers"]
    # Supervisors, hosts and agents listen at ports that the system chooses.
    assert "ports" not in container
    assert "POD_IP" in {variable["name"] for variable in container["env"]}


def test_a_pod_has_all_hosts_of_its_slice(tmp_path):
    overrides = [*slices_and_hosts(4, 16), "devices_per_host=2"]
    *_, job = job_of(*overrides)
    assert job["completions"] == job["parallelism"] == 4
    world = config_of(tmp_path, *overrides).world
    assert (world.hosts, world.slices, world.devices_per_host) == (16, 4, 2)
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_a_failed_pod_is_replaced_alone_and_a_preempted_one_is_not_counted():
    jobset, _, job = job_of("max_restarts=7")
    assert job["backoffLimitPerIndex"] == 7
    # It would count the failures of all pods together.
    assert "backoffLimit" not in job
    exit_code, disruption = job["podFailurePolicy"]["rules"]
    assert exit_code["action"] == "FailJob"
    assert exit_code["onExitCodes"]["values"] == [errors.CONFIG_EXIT_CODE]
    assert disruption["action"] == "Ignore"
    assert disruption["onPodConditions"][0]["type"] == "DisruptionTarget"
    policy = jobset["spec"]["failurePolicy"]
    # A Job that has failed has no pod left that may restart.
    assert policy["maxRestarts"] == 0
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet"]


def test_the_run_has_ended_when_a_supervisor_has():
    *_, job = job_of()
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def test_no_pod_needs_permissions():
    kinds = [document["kind"] for document in jobsets.documents(ELASTIC)]
    assert kinds == ["ConfigMap", "JobSet"]


def test_a_command_gets_the_number_of_machines_too(tmp_path):
    command = 'command=[sh, -c, exec elastic-ckpt train "$ELASTIC_CKPT_CONFIG"]'
    config = config_of(tmp_path, command)
    assert config.elastic == config_of(tmp_path).elastic
    *_, job = job_of(command)
    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["ELASTIC_CKPT_CONFIG"] == "/etc/elastic-ckpt/config.yml"


METRICS = ["prometheus_port=9400", "prometheus_interface=0.0.0.0"]


@pytest.mark.parametrize(
    ("monitor", "kind", "endpoints"),
    [
        ("pod_monitoring", "PodMonitoring", "endpoints"),
        ("pod_monitor", "PodMonitor", "podMetricsEndpoints"),
        ("service_monitor", "ServiceMonitor", "endpoints"),
    ],
)
def test_the_metrics_of_every_process_of_every_pod_are_collected(
    tmp_path, monitor, kind, endpoints
):
    overrides = [*slices_and_hosts(2, 4), "devices_per_host=4", *METRICS]
    overrides.append(f"metrics_monitor={monitor}")
    built = jobsets.documents(ELASTIC, *overrides)
    assert manifest_check.problems(built) == []
    config = config_of(tmp_path, *overrides)
    processes = [listeners.of_process(config, host) for host in (0, 1, 2, 3, None)]
    served = [process.metrics.prometheus_port for process in processes]
    # Two pods with two hosts, and the supervisor that leads.
    assert served == [9400, 9401, 9400, 9401, 9402]
    (container,) = jobsets.pods(built)["hosts"]["spec"]["containers"]
    ports = {each.get("name"): each["containerPort"] for each in container["ports"]}
    collected = [each["port"] for each in jobsets.only(kind, built)["spec"][endpoints]]
    assert sorted(ports[name] for name in collected) == sorted({*served})
    if monitor == "service_monitor":
        listed = jobsets.only("Service", built)["spec"]["ports"]
        assert {each["name"]: each["port"] for each in listed} == {
            name: ports[name] for name in collected
        }


@pytest.mark.parametrize("key", ["pod_startup_probe", "pod_liveness_probe"])
def test_a_probe_of_metrics_would_end_pods_whose_hosts_start_again(key):
    with pytest.raises(errors.ConfigError, match=f"{key} reads metrics.*come and go"):
        jobsets.documents(ELASTIC, f"{key}={{periodSeconds: 5}}", *METRICS)
    of_its_own = f"{key}={{exec: {{command: [test, -e, /tmp/ready]}}}}"
    assert jobsets.documents(ELASTIC, of_its_own, *METRICS)


@pytest.mark.parametrize(
    "overrides",
    [
        [*slices_and_hosts(2, 4), "devices_per_host=4"],
        ["local_checkpoint_volume=node_agent"],
        ["hardware=cpu", "machine_type=n2-standard-16"],
        ["kueue_queue=q", "host_network=true", "pod_env={A: b}"],
    ],
)
def test_every_form_of_it_is_a_valid_manifest(overrides):
    built = jobsets.documents(ELASTIC, *overrides)
    assert manifest_check.problems(built) == []


TPUS = ["hardware=tpu", "machine_type=ct6e-standard-4t"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*TPUS, "topology=4x4", "hosts=16"], "=tpu"),
        (["maxtext={model_name: llama2-7b}"], "on one machine only"),
        (["elastic_machines=2"], "each slice is a pod; leave it out"),
        (slices_and_hosts(1, 4), "set slices to 2 or more"),
        (slices_and_hosts(4, 8), "set hosts=4 and devices_per_host=8"),
        (["restart_strategy=in_place"], "set restart_strategy=recreate"),
        (["restart_strategy=restart_job"], "set restart_strategy=recreate"),
        (["run_name=My_Run"], "is not valid as the name of a JobSet"),
    ],
)
def test_pods_that_cannot_have_supervisors_are_refused(overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        jobsets.documents(ELASTIC, *overrides)
