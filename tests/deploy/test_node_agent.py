"""The RAM disk of a pod, and the agents of nodes."""

import argparse

import pytest

from elastic_ckpt.cli import agent as agent_verb
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import manifest, nodes
from elastic_ckpt.training import load
from tests.deploy import jobsets, manifest_check

NODE = "node_agent_h100"
ALL = (jobsets.GPU, jobsets.TPU, jobsets.PATHWAYS)


def agents(*overrides, name=NODE):
    config = load.load(jobsets.SHIPPED / f"{name}.yml", overrides)
    return nodes.documents(config)


def pod_of(documents):
    daemon_set = jobsets.only("DaemonSet", documents)
    return daemon_set["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("name", "written"),
    [(NODE, "node_agents"), ("gke_multitier_v6e", "checkpoint_configuration")],
)
def test_what_nodes_need_is_that_of_the_shipped_configurations(name, written, golden):
    text = manifest.to_yaml(agents(name=name))
    golden(str(jobsets.SHIPPED / f"{written}.yaml"), text)


def test_agents_of_other_nodes_are_other_objects():
    gpu = jobsets.only("DaemonSet", agents())
    tpu = jobsets.only(
        "DaemonSet",
        nodes.documents(
            load.load(
                jobsets.SHIPPED / f"{jobsets.TPU}.yml",
                ["local_checkpoint_volume=node_agent", "elastic_enabled=false"],
            )
        ),
    )
    assert gpu["metadata"]["name"] != tpu["metadata"]["name"]
    # A pod belongs to the agents of one kind.
    for some, others in ((gpu, tpu), (tpu, gpu)):
        wanted = some["spec"]["selector"]["matchLabels"].items()
        assert wanted <= some["spec"]["template"]["metadata"]["labels"].items()
        assert not wanted <= others["spec"]["template"]["metadata"]["labels"].items()


def test_the_agents_are_valid_objects_of_kubernetes():
    for overrides in ((), ("spot=true", "pod_image_pull_secrets=[a]")):
        assert manifest_check.problems(agents(*overrides)) == []


def test_the_command_is_one_that_the_agent_takes():
    (container,) = pod_of(agents())["containers"]
    program, verb, *arguments = container["command"]
    assert (program, verb) == ("elastic-ckpt", "agent")
    parser = argparse.ArgumentParser()
    agent_verb.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    assert parsed.node
    assert parsed.directory == "/local"
    assert parsed.remove_unused_after == 24 * 3600
    assert parsed.max_bytes == 256 * 2**30
    assert parsed.domain_labels == "row=example.com/row"
    variables = {variable["name"] for variable in container["env"]}
    assert {parsed.interface, parsed.kubernetes_node} == {
        f"$({name})" for name in variables
    }


def test_the_agents_have_their_image_and_directory():
    chosen = ["node_agent_image=registry/agent:2", "node_agent_directory=/ram"]
    pod = pod_of(agents(*chosen))
    assert pod["containers"][0]["image"] == "registry/agent:2"
    assert [volume["hostPath"]["path"] for volume in pod["volumes"]] == ["/ram"]


def test_the_port_and_the_priority_of_the_agents_are_those_of_their_keys():
    documents = agents("node_agent_port=8477", "node_agent_priority_class=system")
    assert manifest_check.problems(documents) == []
    pod = pod_of(documents)
    assert pod["priorityClassName"] == "system"
    assert "PriorityClass" not in [each["kind"] for each in documents]
    (container,) = pod["containers"]
    parser = argparse.ArgumentParser()
    agent_verb.add_arguments(parser)
    assert parser.parse_args(container["command"][2:]).port == 8477
    assert container["ports"] == [{"containerPort": 8477}]


def test_pods_of_runs_do_not_evict_the_agents():
    documents = agents("pod_priority_class=low")
    assert manifest_check.problems(documents) == []
    own = jobsets.only("PriorityClass", documents)
    # The most that Kubernetes lets users have.
    assert own["value"] == 10**9
    assert pod_of(documents)["priorityClassName"] == own["metadata"]["name"]


def test_without_limits_the_agent_keeps_all():
    none = ["node_agent_hours_unused=0", "node_agent_size_limit="]
    (container,) = pod_of(agents(*none))["containers"]
    assert not {"--remove-unused-after", "--max-bytes"} & {*container["command"]}


def test_the_account_of_the_agents_may_read_nodes_and_nothing_else():
    documents = agents("namespace=runs")
    (rule,) = jobsets.only("ClusterRole", documents)["rules"]
    assert rule == {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
    account = jobsets.only("ServiceAccount", documents)["metadata"]
    (subject,) = jobsets.only("ClusterRoleBinding", documents)["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], "runs")
    assert pod_of(documents)["serviceAccountName"] == account["name"]


def test_the_agents_run_on_the_nodes_of_the_runs_and_keep_their_addresses():
    pod = pod_of(agents("spot=true", "pod_node_selector={pool: a}"))
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
        "cloud.google.com/gke-spot": "true",
        "pool": "a",
    }
    assert {"operator": "Exists"} in pod["tolerations"]
    assert pod["hostNetwork"]


def test_the_agents_run_as_the_user_of_the_pods():
    pod = pod_of(agents("pod_security_context={runAsUser: 1000}"))
    assert pod["securityContext"] == {"runAsUser": 1000}


def test_certificates_are_mounted_for_the_agent():
    tls = [f"peer_tls_{name}=/keys/{name}" for name in ("certificate", "key", "ca")]
    volume = "pod_volumes={/keys: {secret: {secretName: keys}, readOnly: true}}"
    documents = agents(*tls, volume)
    (container,) = pod_of(documents)["containers"]
    assert "/keys" in {mount["mountPath"] for mount in container["volumeMounts"]}
    command = container["command"]
    assert command[command.index("--tls-key") + 1] == "/keys/key"
    assert manifest_check.problems(documents) == []


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ("empty_dir", {"emptyDir": {"medium": "Memory", "sizeLimit": "7Gi"}}),
        (
            "node_agent",
            {"hostPath": {"path": "/dev/shm/runs", "type": "Directory"}},
        ),
        (
            "gke_multitier",
            {"csi": {"driver": "multitier-checkpoint.csi.storage.gke.io"}},
        ),
    ],
)
def test_the_ram_disk_of_a_pod_is_the_volume_of_its_key(name, volume, source):
    chosen = [f"local_checkpoint_volume={volume}", "local_checkpoint_size_limit=7Gi"]
    chosen.append("node_agent_directory=/dev/shm/runs")
    documents = jobsets.documents(name, *chosen)
    assert manifest_check.problems(documents) == []
    roles = jobsets.roles(name, *chosen)
    template, container = roles.get("worker") or roles["host"]
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == "/local")
    assert volumes[mount["name"]] == {"name": mount["name"], **source}
    # RAM disk and shared memory: all of it counts as the pod's, wherever it is.
    memory = "39Gi" if name == jobsets.PATHWAYS else "23Gi"
    assert container["resources"]["requests"]["memory"] == memory


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["local_checkpoint_volume=empty_dir"], "needs nothing of the nodes"),
        (["node_agent_size_limit=much"], "not an amount"),
        (["node_agent_image=agent"], "does not name an image"),
        (["node_agent_priority_class=A"], "not a valid"),
        (["node_agent_directory=runs"], "cannot be mounted"),
        (["local_checkpoint_directory="], "cannot be mounted"),
    ],
)
def test_wrong_values_name_their_key(overrides, message):
    with pytest.raises(errors.ConfigError, match=message) as error:
        agents(*overrides)
    assert overrides[0].partition("=")[0] in str(error.value)


def test_gke_gets_the_configuration_of_its_volumes():
    documents = agents("local_checkpoint_volume=gke_multitier", "spot=true")
    assert manifest_check.problems(documents) == []
    (configuration,) = documents
    assert configuration["spec"] == {
        "cloudStorageBucketName": "my-bucket",
        "nodeSelector": {
            "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
            "cloud.google.com/gke-spot": "true",
        },
        "tolerations": [
            {
                "key": "cloud.google.com/gke-spot",
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            },
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        ],
        "inMemoryVolumeSize": "64Gi",
    }


def test_gke_needs_a_bucket_of_its_cloud():
    program = ["python_module=a.b", "base_output_directory=s3://bucket/runs"]
    with pytest.raises(errors.ConfigError, match="not in a bucket of Google"):
        agents("local_checkpoint_volume=gke_multitier", *program)
