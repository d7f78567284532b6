"""The agents of nodes and backup hosts, and pods with supervisors, at work."""

import argparse

import pytest

from elastic_ckpt.cli import agent as agent_verb
from elastic_ckpt.deploy import manifest, nodes
from elastic_ckpt.training import configured, listeners, machine_run
from tests.deploy import jobsets

BACKUP, ELASTIC, NODE = "backup_h100", "elastic_h100", "node_agent_h100"


def parsed(job):
    """The options of the agent in a pod, and its container."""
    (container,) = job["template"]["spec"]["containers"]
    program, verb, *arguments = container["command"]
    assert (program, verb) == ("elastic-ckpt", "agent")
    parser = argparse.ArgumentParser()
    agent_verb.add_arguments(parser)
    return parser.parse_args(arguments), container


@pytest.mark.parametrize(
    ("name", "written"),
    [(NODE, "node_agents"), ("gke_multitier_v6e", "checkpoint_configuration")],
)
def test_what_nodes_need_is_that_of_the_shipped_configurations(name, written, golden):
    text = manifest.to_yaml(jobsets.documents(name, build=nodes.documents))
    golden(jobsets.SHIPPED / f"{written}.yaml", text)


def test_a_pod_belongs_to_the_agents_of_one_kind_of_nodes():
    volume = ["local_checkpoint_volume=node_agent", "elastic_enabled=false"]
    gpu, tpu = (
        jobsets.only("DaemonSet", jobsets.documents(name, *of, build=nodes.documents))
        for name, of in ((NODE, []), (jobsets.TPU, volume))
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


def test_the_agent_of_a_backup_host_takes_its_command():
    options, container = parsed(jobsets.jobs(jobsets.documents(BACKUP))["backup"])
    assert options.backup
    assert options.secret_file == "/etc/run-secret/secret"
    assert options.interface == "$(POD_IP)"
    assert "POD_IP" in {variable["name"] for variable in container["env"]}
    # Both have the secret, and a RAM disk below which the run is.
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert paths == {"/etc/run-secret", options.directory.rpartition("/")[0]}


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


def test_each_pod_with_a_supervisor_is_a_machine_with_its_own_address(tmp_path):
    built = jobsets.documents(ELASTIC)
    (job,) = jobsets.jobs(built).values()
    config = jobsets.configured(built, tmp_path)
    for pod in range(job["completions"]):
        # Kubernetes sets the first in the pods of an indexed Job.
        environment = {"JOB_COMPLETION_INDEX": str(pod), "POD_IP": f"10.0.0.{pod}"}
        place = machine_run.place(config, environment)
        assert place.num_machines == 4
        assert place.slices == range(pod, pod + 1)
        assert place.interface == f"10.0.0.{pod}"


def test_a_command_gets_the_number_of_machines_too(tmp_path):
    command = 'command=[sh, -c, exec elastic-ckpt train "$ELASTIC_CKPT_CONFIG"]'
    elastic = [
        jobsets.configured(jobsets.documents(ELASTIC, *of), tmp_path).elastic
        for of in ((), (command,))
    ]
    assert elastic[0] == elastic[1]
    assert elastic[0].elastic_machines == 4


def test_the_metrics_of_every_process_of_every_pod_are_collected(tmp_path):
    overrides = ["slices=2", "hosts=4", "devices_per_host=4", "prometheus_port=9400"]
    overrides += ["prometheus_interface=0.0.0.0", "metrics_monitor=pod_monitor"]
    built = jobsets.documents(ELASTIC, *overrides)
    config = jobsets.configured(built, tmp_path)
    processes = [listeners.of_process(config, host) for host in (0, 1, 2, 3, None)]
    served = [process.metrics.prometheus_port for process in processes]
    # Two pods with two hosts, and the supervisor that leads.
    assert served == [9400, 9401, 9400, 9401, 9402]
    endpoints = jobsets.only("PodMonitor", built)["spec"]["podMetricsEndpoints"]
    ports = jobsets.program(built)["ports"]
    by_name = {each.get("name"): each["containerPort"] for each in ports}
    assert {by_name[each["port"]] for each in endpoints} == {*served}
