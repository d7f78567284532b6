"""Each key about pods arrives in both kinds of JobSet, where it applies."""

import json

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.training import keys, load, schema
from tests.deploy import jobsets, manifest_check

ALL = ("host", "head", "worker")
NO_HEAD = ("host", "worker")
PROGRAMS = ("host", "head")
SPOT = {"cloud.google.com/gke-spot": "true"}
PREEMPTIBLE = {
    "key": "cloud.google.com/gke-spot",
    "operator": "Equal",
    "value": "true",
    "effect": "NoSchedule",
}
PROBE = {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "failureThreshold": 60}
NODES = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "rack", "operator": "Exists"}]}
            ]
        }
    }
}
TOKEN = {"secretKeyRef": {"name": "hub", "key": "token"}}
UNREACHABLE = [
    {
        "key": f"node.kubernetes.io/{condition}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 30,
    }
    for condition in ("unreachable", "not-ready")
]
USER = {"runAsUser": 1000, "fsGroup": 1000}
LOCK = {"capabilities": {"add": ["IPC_LOCK"]}}
CLAIM = {"persistentVolumeClaim": {"claimName": "texts"}}
# Key: the value, where it arrives, and as what, in the pods of which roles.
SETTINGS = {
    "program_cpus": (3.5, "container.resources.requests.cpu", "3500m", PROGRAMS),
    "sidecar_cpus": (8, "container.resources.requests.cpu", "8", ("worker",)),
    "spot": (True, "spec.nodeSelector", SPOT, NO_HEAD),
    "reservation": (
        "shared/h100s",
        "spec.nodeSelector",
        {
            "cloud.google.com/reservation-affinity": "specific",
            "cloud.google.com/reservation-name": "h100s",
            "cloud.google.com/reservation-project": "shared",
        },
        NO_HEAD,
    ),
    "pod_node_selector": ({"pool": "a"}, "spec.nodeSelector", {"pool": "a"}, NO_HEAD),
    "pod_affinity": (NODES, "spec.affinity", NODES, NO_HEAD),
    "pod_tolerations": ([PREEMPTIBLE], "spec.tolerations", [PREEMPTIBLE], ALL),
    "pod_priority_class": ("high", "spec.priorityClassName", "high", ALL),
    "pod_labels": ({"team": "a"}, "metadata.labels", {"team": "a"}, ALL),
    "pod_annotations": ({"note": "b"}, "metadata.annotations", {"note": "b"}, ALL),
    "pod_image_pull_secrets": (
        ["registry"],
        "spec.imagePullSecrets",
        [{"name": "registry"}],
        ALL,
    ),
    "pod_env": (
        {"LEVEL": 3, "TOKEN": TOKEN, "QUIET": True},
        "container.env",
        [
            {"name": "LEVEL", "value": "3"},
            {"name": "TOKEN", "valueFrom": TOKEN},
            {"name": "QUIET", "value": "true"},
        ],
        ALL,
    ),
    "pod_env_secrets": (
        ["hub"],
        "container.envFrom",
        [{"secretRef": {"name": "hub"}}],
        ALL,
    ),
    "pod_volumes": (
        {"/data": {**CLAIM, "readOnly": True}},
        "container.volumeMounts",
        [{"name": "user-data", "mountPath": "/data", "readOnly": True}],
        ALL,
    ),
    "pod_unreachable_seconds": (30, "spec.tolerations", UNREACHABLE, ALL),
    "pod_security_context": (USER, "spec.securityContext", USER, ALL),
    "program_security_context": (LOCK, "container.securityContext", LOCK, ALL),
    "pod_startup_probe": (PROBE, "container.startupProbe", PROBE, PROGRAMS),
    "pod_liveness_probe": (PROBE, "container.livenessProbe", PROBE, PROGRAMS),
    "host_network": (True, "spec.dnsPolicy", "ClusterFirstWithHostNet", ALL),
}
# They have separate tests.
ELSEWHERE = {"program_memory", "sidecar_memory", "gpu_direct", "gpu_direct_networks"}
OF_JOBSET = {
    "ttl_seconds_after_finished": (60, "spec.ttlSecondsAfterFinished", 60),
    "kueue_queue": ("q", "metadata.labels", {"kueue.x-k8s.io/queue-name": "q"}),
    "pod_labels": ({"team": "a"}, "metadata.labels", {"team": "a"}),
    "pod_annotations": ({"note": "b"}, "metadata.annotations", {"note": "b"}),
    "max_restarts": (3, "spec.failurePolicy.maxRestarts", 3),
}


def override(key, value):
    return f"{key}={json.dumps(value)}"


def at(value, path):
    for step in path.split("."):
        value = (value or {}).get(step)
    return value


def has(actual, expected):
    """Whether `actual` has what `expected` has; lists and mappings may have more."""
    if isinstance(expected, dict):
        return isinstance(actual, dict) and expected.items() <= actual.items()
    if isinstance(expected, list):
        return isinstance(actual, list) and all(each in actual for each in expected)
    return actual == expected


def test_the_table_has_every_key_of_the_section():
    section = {key for key, (name, _) in keys.keys().items() if name == "pods"}
    assert SETTINGS.keys() | ELSEWHERE == section


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.TPU, jobsets.PATHWAYS])
def test_a_setting_arrives_in_the_pods_to_which_it_applies_and_in_no_others(name, key):
    value, path, expected, wanted = SETTINGS[key]
    before = jobsets.roles(name)
    changed = jobsets.roles(name, override(key, value))
    for role, (template, container) in changed.items():
        arrived = has(at({"container": container, **template}, path), expected)
        assert arrived == (role in wanted), role
        if role not in wanted:
            assert (template, container) == before[role]
    built = jobsets.documents(name, override(key, value))
    assert manifest_check.problems(built) == []


@pytest.mark.parametrize("key", OF_JOBSET)
@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.TPU, jobsets.PATHWAYS])
def test_a_setting_of_the_jobset_arrives_there(name, key):
    value, path, expected = OF_JOBSET[key]
    before = jobsets.only("JobSet", jobsets.documents(name))
    built = jobsets.documents(name, override(key, value))
    assert not has(at(before, path), expected)
    assert has(at(jobsets.only("JobSet", built), path), expected)
    assert manifest_check.problems(built) == []


def test_a_jobset_in_a_queue_waits_for_kueue():
    for name in (jobsets.GPU, jobsets.PATHWAYS):
        built = jobsets.documents(name, kueue_queue="q")
        assert jobsets.only("JobSet", built)["spec"]["suspend"] is True
        assert "suspend" not in jobsets.only("JobSet", jobsets.documents(name))["spec"]


def test_a_spot_host_tolerates_the_taint_of_spot_nodes():
    for name in (jobsets.GPU, jobsets.PATHWAYS):
        for role, (template, _) in jobsets.roles(name, spot=True).items():
            tolerations = template["spec"].get("tolerations", [])
            assert (PREEMPTIBLE in tolerations) == (role != "head")


def test_a_host_in_the_network_of_its_node_has_both_fields():
    (template, _) = jobsets.roles(jobsets.GPU, host_network=True)["host"]
    assert template["spec"]["hostNetwork"] is True


@pytest.mark.parametrize(
    ("source", "volume"),
    [
        ({"hostPath": {"path": "/mnt/ssd"}}, {"hostPath": {"path": "/mnt/ssd"}}),
        (
            {"secret": {"secretName": "keys"}, "readOnly": True},
            {"secret": {"secretName": "keys"}},
        ),
        (
            {"gcsfuse": "my-bucket"},
            {
                "csi": {
                    "driver": "gcsfuse.csi.storage.gke.io",
                    "volumeAttributes": {
                        "bucketName": "my-bucket",
                        "mountOptions": "implicit-dirs",
                    },
                }
            },
        ),
    ],
)
@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.PATHWAYS])
def test_a_volume_is_of_its_source_in_every_pod_of_ours(name, source, volume):
    setting = override("pod_volumes", {"/a/b": source})
    for template, container in jobsets.roles(name, setting).values():
        assert {"name": "user-a-b", **volume} in template["spec"]["volumes"]
        (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == "/a/b")
        assert mount["name"] == "user-a-b"
        # Without it GKE adds no driver to the pod.
        annotations = template.get("metadata", {}).get("annotations", {})
        assert ("gke-gcsfuse/volumes" in annotations) == ("gcsfuse" in source)
    assert manifest_check.problems(jobsets.documents(name, setting)) == []


def test_the_users_variable_replaces_one_of_the_manifest():
    setting = override("pod_env", {"JAX_PLATFORMS": "cpu"})
    _, container = jobsets.roles(jobsets.PATHWAYS, setting)["head"]
    values = [v["value"] for v in container["env"] if v["name"] == "JAX_PLATFORMS"]
    assert values == ["cpu"]


def test_ram_disk_and_shared_memory_count_as_memory_of_the_host():
    sizes = {"local_checkpoint_size_limit": "7Gi", "shared_memory_size_limit": "512Mi"}
    _, host = jobsets.roles(jobsets.GPU, program_memory="100Gi", **sizes)["host"]
    memory = f"{107 * 1024 + 512}Mi"
    assert host["resources"]["requests"]["memory"] == memory
    assert host["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": memory}
    # Without a limit of the program's own there is none, but the volumes are counted.
    _, host = jobsets.roles(jobsets.GPU, **sizes)["host"]
    assert host["resources"]["requests"]["memory"] == f"{7 * 1024 + 512}Mi"
    assert "memory" not in host["resources"]["limits"]


def test_under_pathways_the_memory_is_that_of_the_sidecar():
    settings = {
        "program_memory": "30Gi",
        "sidecar_memory": "100Gi",
        "local_checkpoint_size_limit": "7Gi",
        "shared_memory_size_limit": "3Gi",
    }
    roles = jobsets.roles(jobsets.PATHWAYS, **settings)
    # /dev/shm, and what the sidecar shares with the server.
    assert roles["worker"][1]["resources"]["limits"]["memory"] == "113Gi"
    assert roles["head"][1]["resources"]["limits"]["memory"] == "30Gi"


def test_without_a_ram_disk_its_memory_is_not_requested():
    settings = {"local_checkpoint_directory": "", "shared_memory_size_limit": "3Gi"}
    _, host = jobsets.roles(jobsets.GPU, **settings)["host"]
    assert host["resources"]["requests"] == {"memory": "3Gi"}


def test_memory_of_a_volume_of_the_user_counts_too():
    volume = {"/scratch": {"emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}}}
    _, host = jobsets.roles(jobsets.GPU, override("pod_volumes", volume))["host"]
    assert host["resources"]["requests"]["memory"] == "100Gi"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pod_env=A", "pod_env takes a mapping, such as {name: value}, not A"),
        ("pod_tolerations={a: b}", "pod_tolerations takes a list"),
        ("pod_image_pull_secrets=[1]", "pod_image_pull_secrets takes a list of names"),
        ("pod_env_secrets=[A]", "pod_env_secrets='A' is not a valid"),
        ("pod_volumes={data: {gcsfuse: b}}", "has the path 'data'; write an absolute"),
        ("pod_volumes={/data: b}", "has 'b' at /data; write one source"),
        ("pod_volumes={/data: {readOnly: true}}", "at /data; write one source"),
        ("pod_volumes={/dev/shm: {emptyDir: {}}}", "mounts another volume"),
        ("program_memory=lots", "program_memory='lots' is not an amount"),
        ("reservation=A", "reservation='A' is not a valid"),
        ("pod_priority_class=A", "pod_priority_class='A' is not a valid"),
        ("kueue_queue=A", "kueue_queue='A' is not a valid"),
    ],
)
def test_a_setting_that_is_not_one_is_refused(setting, message):
    with pytest.raises(errors.ConfigError, match=message):
        jobsets.documents(jobsets.GPU, setting)


def test_spot_machines_are_never_reserved():
    with pytest.raises(errors.ConfigError, match="set only one of the two"):
        jobsets.documents(jobsets.GPU, spot=True, reservation="a")


def test_structured_values_survive_the_text_of_the_configuration(tmp_path):
    value = {"A": 'it\'s "b"', "C": [1, {"d": None}]}
    config = load.load(jobsets.SHIPPED / "multicontroller_h100.yml")
    path = tmp_path / "a.yml"
    path.write_text(override("pod_env", value).replace("=", ": ", 1))
    loaded = load.load(path)
    assert json.loads(loaded.pods.pod_env) == value
    path.write_text(keys.resolved_yaml(loaded, {}))
    assert load.load(path) == loaded
    assert config.pods == schema.PodsSection()
