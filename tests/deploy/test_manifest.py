import json
import sys
import types

import pytest
import yaml
from jax._src.clusters import k8s_cluster

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import machine, manifest
from elastic_ckpt.training import keys, load, schema
from tests.deploy import manifest_check
from tests.deploy.jobsets import GPU, PATHWAYS, SHIPPED, TPU, documents, only

CONFIGS = sorted(path.stem for path in SHIPPED.glob("*.yml"))
# They train with the configuration itself.
TRAINED = [GPU, TPU, PATHWAYS]
# This one is for Slurm.
CONFIGS.remove("slurm_h100")


def replicated_job(name, *overrides, job=-1):
    """A replicated job of a JobSet, its Job and the pods of that."""
    built = only("JobSet", documents(name, *overrides))["spec"]["replicatedJobs"][job]
    spec = built["template"]["spec"]
    return built, spec, spec["template"]["spec"]


def mounts(container):
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shipped_manifests_are_those_of_the_shipped_configurations(name, golden):
    golden(str(SHIPPED / f"{name}.yaml"), manifest.to_yaml(documents(name)))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_yaml_says_what_the_documents_say(name):
    built = documents(name)
    assert list(yaml.safe_load_all(manifest.to_yaml(built))) == built


@pytest.mark.parametrize("name", TRAINED)
def test_the_pods_train_with_the_configuration_of_the_manifest(name, tmp_path):
    odd = 'a: "b" # c\\d'
    config = load.load(SHIPPED / f"{name}.yml", [f"train_data_columns='{odd}'"])
    assert config.data.train_data_columns == odd
    config_map = only("ConfigMap", manifest.documents(config))
    (text,) = config_map["data"].values()
    (tmp_path / "config.yml").write_text(text)
    # The hosts are those that the JobSet starts.
    overrides = [f"hosts={config.world.hosts}"]
    assert load.load(tmp_path / "config.yml", overrides) == config
    *_, pods = replicated_job(name, job=0)
    (container,) = pods["containers"]
    (file,) = config_map["data"]
    directory, _, seen = container["command"][-1].rpartition("/")
    assert (container["command"][:-1], seen) == (["elastic-ckpt", "train"], file)
    volume = next(
        v for v in pods["volumes"] if v["name"] == mounts(container)[directory]
    )
    assert volume["configMap"] == {"name": config_map["metadata"]["name"]}


@pytest.mark.parametrize("slices", [1, 2, 3, 12])
def test_a_tpu_slice_is_a_job_as_wide_as_the_slice_has_hosts(slices):
    setting = [f"slices={slices}", "topology=4x8", "global_batch_size=1152"]
    for name in (PATHWAYS, TPU):
        built, job, pods = replicated_job(name, *setting)
        assert built["replicas"] == slices
        assert job["completions"] == job["parallelism"] == 8
        assert job["completionMode"] == "Indexed"
        (container,) = pods["containers"]
        assert container["resources"]["limits"] == {"google.com/tpu": "4"}


def test_without_tpus_all_slices_are_the_one_job_in_which_jax_counts_hosts(monkeypatch):
    for slices in (1, 2, 4):
        built, job, _ = replicated_job(GPU, f"slices={slices}")
        assert built["replicas"] == 1
        spec = types.SimpleNamespace(**job)
        answer = types.SimpleNamespace(spec=spec)
        of_api = classmethod(lambda _, answer=answer: answer)
        monkeypatch.setattr(k8s_cluster.K8sCluster, "_job", of_api)
        assert k8s_cluster.K8sCluster.get_process_count() == 4
        # Each pod learns its place from the index of an indexed Job.
        assert job["completionMode"] == "Indexed"


def test_where_jax_asks_the_kubernetes_api_the_pods_may():
    built = documents(GPU)
    name = only("ServiceAccount", built)["metadata"]["name"]
    *_, pods = replicated_job(GPU)
    (subject,) = only("RoleBinding", built)["subjects"]
    assert pods["serviceAccountName"] == subject["name"] == name
    rules = only("Role", built)["rules"]
    allowed = {(rule["resources"][0], verb) for rule in rules for verb in rule["verbs"]}
    assert {("pods", "list"), ("jobs", "get")} <= allowed


def test_an_account_of_ones_own_is_used_and_not_written():
    built = documents(GPU, "service_account=trainer")
    assert "ServiceAccount" not in [document["kind"] for document in built]
    assert only("RoleBinding", built)["subjects"][0]["name"] == "trainer"
    for name, job in ((GPU, 0), (TPU, 0), (PATHWAYS, 0), (PATHWAYS, 1)):
        *_, pods = replicated_job(name, "service_account=trainer", job=job)
        assert pods["serviceAccountName"] == "trainer"


@pytest.mark.parametrize("name", TRAINED)
def test_ram_disk_and_shared_memory_are_where_the_program_of_a_host_runs(name):
    sizes = ["local_checkpoint_size_limit=7Gi", "shared_memory_size_limit=3Gi"]
    *_, pods = replicated_job(name, "local_checkpoint_directory=/ram", *sizes)
    memory = {
        volume["name"]: volume["emptyDir"]
        for volume in pods["volumes"]
        if "emptyDir" in volume
    }
    # Under Pathways that is the sidecar, which starts before the server.
    container = pods.get("initContainers", pods["containers"])[0]
    built = {path: memory[n] for path, n in mounts(container).items() if n in memory}
    assert built["/ram"] == {"medium": "Memory", "sizeLimit": "7Gi"}
    assert built["/dev/shm"] == {"medium": "Memory", "sizeLimit": "3Gi"}


@pytest.mark.parametrize("name", TRAINED)
def test_no_ram_disk_is_mounted_if_there_is_to_be_none(name):
    built = documents(name, "local_checkpoint_directory=")
    assert "local-checkpoints" not in manifest.to_yaml(built)
    assert manifest_check.problems(built) == []


def test_under_pathways_the_head_runs_the_program_and_the_sidecar_our_image():
    *_, head = replicated_job(PATHWAYS, job=0)
    (program,) = head["containers"]
    assert {"name": "JAX_PLATFORMS", "value": "proxy"} in program["env"]
    assert program["image"].endswith("elastic-ckpt-head:1")
    servers = [container["name"] for container in head["initContainers"]]
    assert servers == ["pathways-rm", "pathways-proxy"]
    *_, workers = replicated_job(PATHWAYS)
    (sidecar,) = workers["initContainers"]
    assert sidecar["image"].endswith("elastic-ckpt-sidecar:1")
    server = workers["containers"][0]
    assert mounts(server)["/tmp/shared-memory"] == mounts(sidecar)["/tmp/shared-memory"]


def test_a_failed_host_starts_the_job_again_so_many_times():
    for name in TRAINED:
        built = only("JobSet", documents(name, "max_restarts=3"))
        assert built["spec"]["failurePolicy"]["maxRestarts"] == 3
        pods = replicated_job(name, "termination_grace_period_seconds=9")[2]
        assert pods["terminationGracePeriodSeconds"] == 9


@pytest.mark.parametrize("hardware", ["cpu", "gpu", "tpu"])
def test_every_machine_of_every_hardware_makes_a_manifest_without_problems(hardware):
    machines = {
        "cpu": ("", "n2-standard-16"),
        "gpu": machine._GPUS,
        "tpu": machine._TPUS,
    }
    for machine_type in machines[hardware]:
        chosen = [f"machine_type={machine_type}", "topology=", "hosts=4"]
        if hardware == "tpu":
            chosen = largest_slice(machine_type)
        built = documents(TPU, f"hardware={hardware}", *chosen)
        assert manifest_check.problems(built) == []


def largest_slice(machine_type):
    """The settings of a slice of TPU machines; those of one host are alone."""
    topology = machine._TPUS[machine_type].topologies[-1]
    return [
        f"machine_type={machine_type}",
        f"topology={topology}",
        f"slices={1 if topology == '2x4' else 2}",
        "global_batch_size=1024",
    ]


def test_tpu_machines_are_what_pathwaysutils_takes_them_for():
    from pathwaysutils.experimental.gke import jobset

    labels = jobset.MACHINE_TYPE_TO_GKE_ACCELERATOR_TYPE_MAP
    assert machine._TPUS.keys() == {name for name in labels if "-" in name}
    for name, tpu in machine._TPUS.items():
        assert tpu.label == labels[name]
        setting = largest_slice(name)
        ours, theirs = (replicated_job(kind, *setting) for kind in (TPU, PATHWAYS))
        assert ours[1]["completions"] == theirs[1]["completions"]
        assert ours[2]["nodeSelector"] == theirs[2]["nodeSelector"]
        limits = [
            pods["containers"][0]["resources"]["limits"] for *_, pods in (ours, theirs)
        ]
        assert limits[0] == limits[1]


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(errors.ConfigError, match=r"pip install '\.\[pathways\]"):
        documents(PATHWAYS)
    # The other kind needs nothing.
    assert documents(TPU)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        (GPU, "run_name=", "run_name is empty"),
        (GPU, "run_name=my_run", "set run_name=my-run$"),
        (TPU, "docker_image=", "docker_image='' does not name an image"),
        (TPU, "docker_image=trainer", "write registry/repository:tag"),
        (TPU, "namespace=My_Space", "namespace='My_Space' is not a valid Kubernetes"),
        (TPU, "service_account=a..b", "service_account='a..b' is not a valid"),
        (
            TPU,
            "base_output_directory=runs",
            "base_output_directory='runs' is local to",
        ),
        (TPU, "local_checkpoint_directory=ram", "write an absolute path"),
        (TPU, "local_checkpoint_directory=/tmp", "path that nothing else uses"),
        (TPU, "local_checkpoint_size_limit=64GB", "write 64Gi or 512Mi"),
        (TPU, "shared_memory_size_limit=many", "='many' is not an amount of memory"),
        (TPU, "machine_type=ct6e-standard-4", "did you mean 'ct6e-standard-4t'?"),
        (TPU, "machine_type=a3-highgpu-8g", "is not a known machine type for"),
        (TPU, "topology=", "topology='' is not that of a TPU slice"),
        (TPU, "topology=4x", "topology='4x' is not that"),
        (
            TPU,
            "topology=3x3",
            "3x3 does not exist for machine_type=ct6e-standard-4t, whose",
        ),
        (TPU, "topology=4x2", "slices have 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16;"),
        (
            TPU,
            "topology=4x4x4",
            "4x4x4 does not exist for machine_type=ct6e-standard-4t",
        ),
        (TPU, "machine_gpus=8", "only pods with hardware=gpu take GPUs"),
        (GPU, "machine_gpus=9", "machine_type=a3-highgpu-8g, which has 8 GPUs"),
        (GPU, "machine_type=h100-8", "did you mean 'a3-highgpu-8g'?"),
        (GPU, "machine_type=p5.48xlarge", "or set machine_gpus to the number of GPUs"),
        (TPU, "topology=2x2", "slices=2 of topology=2x2 .* have one host each"),
        (TPU, "global_batch_size=100", "100"),
        (TPU, "colocated_python_data_input=true", "set devices_per_host=4"),
        (GPU, "topology=4x4", "only TPU slices have a topology"),
        (GPU, "slices=3", "hosts=4 cannot be divided evenly among slices=3"),
        (PATHWAYS, "hardware=gpu", "Pathways supports only TPUs"),
        (
            PATHWAYS,
            "colocated_python_sidecar_image=",
            "colocated_python_sidecar_image=''",
        ),
        (PATHWAYS, "server_image=a b:1", "server_image='a b:1'"),
        (PATHWAYS, "proxy_server_image=", "proxy_server_image=''"),
        (PATHWAYS, "pathways_gcs_location=/a/b", "pathways_gcs_location='/a/b'"),
        (PATHWAYS, "pathways_head_node_pool=", "pathways_head_node_pool=''"),
    ],
)
def test_a_value_that_cannot_run_is_refused_with_what_to_set(name, override, message):
    with pytest.raises(errors.ConfigError, match=message):
        documents(name, override)


CUBES = ("2x2x2", "2x4x4", "4x4x4", "4x4x8", "8x8x16", "16x16x24")


@pytest.mark.parametrize("topology", [*CUBES, "2x4", "4x2x4", "4x4x6", "3x4x4"])
def test_a_slice_of_three_dimensions_has_the_topology_of_one_that_can_be_had(topology):
    chosen = [f"topology={topology}", "slices=2", "global_batch_size=24576"]
    chosen.append("machine_type=ct5p-hightpu-4t")
    if topology in CUBES:
        _, job, _ = replicated_job(TPU, *chosen)
        chips = [int(length) for length in topology.split("x")]
        assert job["completions"] * 4 == chips[0] * chips[1] * chips[2]
    else:
        with pytest.raises(errors.ConfigError, match="or a larger one of multiples of"):
            documents(TPU, *chosen)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        (GPU, ["program_memory=1793Gi"], "1873Gi of memory.*a3-highgpu-8g has 1872Gi"),
        (TPU, ["local_checkpoint_size_limit=705Gi"], "721Gi .* has 720Gi; lower"),
        (PATHWAYS, ["sidecar_memory=1Ti"], "has 720Gi"),
        (GPU, ["program_cpus=209"], "209 CPUs, and machine_type=.* has 208"),
        (PATHWAYS, ["sidecar_cpus=181"], "181 CPUs, and machine_type=.* has 180"),
    ],
)
def test_a_pod_requests_no_more_than_its_machine_has(name, settings, problem):
    with pytest.raises(errors.ConfigError, match=problem):
        documents(name, *settings)


def test_a_pod_may_request_all_that_its_machine_has():
    assert documents(GPU, "program_memory=1792Gi", "program_cpus=208")
    # The head has another machine.
    assert documents(PATHWAYS, "program_memory=1Ti", "program_cpus=500")


def test_gpus_of_any_machine_are_had_by_keys_alone():
    everywhere = ["machine_type=", "machine_gpus=4", "pod_node_selector={pool: a}"]
    *_, pods = replicated_job(GPU, *everywhere)
    assert pods["nodeSelector"] == {"pool": "a"}
    assert pods["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    aws = ["machine_type=p5.48xlarge", "machine_gpus=8", "devices_per_host=8"]
    aws.append("hosts=2")
    for chosen in (aws, [*aws, "elastic_enabled=true"]):
        built = documents(GPU, *chosen)
        assert manifest_check.problems(built) == []
        *_, pods = replicated_job(GPU, *chosen)
        assert pods["nodeSelector"] == {
            "node.kubernetes.io/instance-type": "p5.48xlarge"
        }
        assert pods["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    *_, pods = replicated_job(GPU, "machine_gpus=2")
    assert pods["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    amd = ["machine_type=", "machine_gpus=8", "gpu_resource=amd.com/gpu"]
    *_, pods = replicated_job(GPU, *amd)
    assert pods["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "8"}


SHARED = {
    "a claim": ("persistentVolumeClaim", {"claimName": "runs"}),
    "NFS": ("nfs", {"server": "10.0.0.2", "path": "/runs"}),
    "Lustre": (
        "csi",
        {"driver": "lustre.csi.storage.gke.io", "volumeAttributes": {}},
    ),
    "one that nodes mount": ("hostPath", {"path": "/mnt/lustre"}),
    "a bucket": ("gcsfuse", "my-bucket"),
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("name", [GPU, TPU, PATHWAYS])
def test_a_run_may_be_on_a_shared_file_system(name, kind):
    source, value = SHARED[kind]
    volume = json.dumps({"/runs": {source: value}})
    built = documents(
        name,
        f"pod_volumes={volume}",
        "base_output_directory=/runs/all",
        "pathways_gcs_location=gs://bucket/pathways",
    )
    assert manifest_check.problems(built) == []
    (text,) = only("ConfigMap", built)["data"].values()
    assert yaml.safe_load(text)["base_output_directory"] == "/runs/all"


@pytest.mark.parametrize(
    ("volumes", "directory", "problem"),
    [
        ({}, "/runs", "local to each pod .* or mount a shared file system there"),
        ({"/run": {"nfs": {}}}, "/runs", "is local to each pod"),
        ({"/runs": {"nfs": {}}}, "runs", "is local to each pod"),
        ({"/runs": {"nfs": {}}}, "/runs/../tmp", "is local to each pod"),
        ({"/runs": {"emptyDir": {}}}, "/runs/a", "on the emptyDir .* for itself"),
        (
            {"/runs": {"nfs": {}}, "/runs/a": {"emptyDir": {}}},
            "/runs/a/b",
            "on the emptyDir that pod_volumes mounts at /runs/a,",
        ),
        ({"/runs": {"nfs": {}, "readOnly": True}}, "/runs", "readOnly: true; remove"),
    ],
)
def test_a_run_that_would_be_lost_with_a_pod_is_refused(volumes, directory, problem):
    with pytest.raises(errors.ConfigError, match=problem):
        documents(
            GPU,
            f"pod_volumes={json.dumps(volumes)}",
            f"base_output_directory={directory}",
        )


def test_a_manifest_has_no_anchors():
    # A Service and its monitor have the same labels, for example.
    metrics = ["prometheus_port=9400", "prometheus_interface=0.0.0.0"]
    for name in CONFIGS:
        built = documents(name, "metrics_monitor=service_monitor", *metrics)
        text = manifest.to_yaml(built)
        for token in yaml.scan(text):
            assert not isinstance(token, yaml.AnchorToken | yaml.AliasToken)


def test_every_key_of_the_section_changes_some_manifest():
    other = {
        "machine_type": "ct5lp-hightpu-4t",
        "topology": "4x8",
        "pathways_gcs_location": "gs://b/c",
        "local_checkpoint_volume": "node_agent",
        "local_checkpoint_directory": "/ram",
        "maxtext": "{model_name: llama2-7b}",
        "manifest_patches": "[{kind: JobSet, patch: {spec: {suspend: true}}}]",
    }
    for key, value in keys.values(schema.Config()).items():
        # Those of nodes, restarts, backup hosts and GPUs have separate tests.
        elsewhere = (
            *("node_agent_", "restart_strategy", "in_place_", "backup_"),
            *("machine_gpus", "gpu_resource"),
        )
        if keys.keys()[key][0] != "deploy" or key.startswith(elsewhere):
            continue
        if isinstance(value, int):
            new = str(value + 1)
        else:
            new = other.get(key, "5Gi" if key.endswith("limit") else "other")
        if key == "metrics_monitor":
            new = "pod_monitor"
        new += ":2" * key.endswith("image")
        with_metrics = ["prometheus_port=9400", "prometheus_interface=0.0.0.0"]
        changed = documents(PATHWAYS, f"{key}={new}", *with_metrics)
        # Not only in the configuration that the manifest carries.
        del changed[0]["data"]
        before = documents(PATHWAYS, *with_metrics)
        del before[0]["data"]
        assert changed != before, key
