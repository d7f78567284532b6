"""The shipped manifests, and what others make of them: JAX, the pods, pathwaysutils."""

import dataclasses
import types

import pytest
import yaml

from elastic_ckpt.deploy import machine, manifest, nodes, slurm
from elastic_ckpt.integrations import maxtext_keys
from elastic_ckpt.training import configured, load
from tests import runs
from tests.deploy import jobsets
from tests.deploy.jobsets import GPU, PATHWAYS, SHIPPED, TPU, documents

SLURM = "slurm_h100"
CONFIGS = sorted({path.stem for path in SHIPPED.glob("*.yml")} - {SLURM})
# What else is made of a configuration.
OF_NODES = {
    "node_agents": "node_agent_h100",
    "checkpoint_configuration": "gke_multitier_v6e",
}


@pytest.mark.parametrize("name", [*CONFIGS, *OF_NODES, SLURM])
def test_a_shipped_manifest_is_what_its_configuration_makes(name, golden):
    if name == SLURM:
        golden(SHIPPED / f"{name}.sh", slurm.script(load.load(SHIPPED / f"{name}.yml")))
        return
    build = nodes.documents if name in OF_NODES else manifest.documents
    built = documents(OF_NODES.get(name, name), build=build)
    golden(SHIPPED / f"{name}.yaml", manifest.to_yaml(built))


def test_the_verb_prints_or_writes_a_manifest(tmp_path):
    config = SHIPPED / f"{TPU}.yml"
    assert runs.verb("manifest", config) == (SHIPPED / f"{TPU}.yaml").read_text()
    path = tmp_path / "job.yaml"
    assert runs.verb("manifest", config, "slices=3", "--output", path) == ""
    *_, jobset = yaml.safe_load_all(path.read_text())
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 3


def test_the_pods_train_with_the_configuration_of_the_manifest(tmp_path):
    odd = 'a: "b" # c\\d'
    config = load.load(SHIPPED / f"{GPU}.yml", [f"train_data_columns='{odd}'"])
    assert config.data.train_data_columns == odd
    built = manifest.documents(config)
    config_map = jobsets.only("ConfigMap", built)
    ((file, text),) = config_map["data"].items()
    (tmp_path / file).write_text(text)
    # The hosts are those that the JobSet starts.
    overrides = [f"hosts={config.world.hosts}"]
    assert load.load(tmp_path / file, overrides) == config
    container = jobsets.program(built)
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    path = f"{mounts['config']}/{file}"
    assert container["command"] == ["elastic-ckpt", "train", path]
    pods = next(iter(jobsets.jobs(built).values()))["template"]["spec"]
    volume = {"name": "config", "configMap": {"name": config_map["metadata"]["name"]}}
    assert volume in pods["volumes"]


def test_maxtext_reads_its_keys_from_the_file_of_its_manifest(tmp_path):
    settings = ["prometheus_port=9400", "prometheus_interface=0.0.0.0"]
    built = documents("maxtext_v6e", *settings, "pod_liveness_probe={periodSeconds: 9}")
    ((name, text),) = jobsets.only("ConfigMap", built)["data"].items()
    path = tmp_path / name
    path.write_text(text)
    config = maxtext_keys.supervised(maxtext_keys.given([str(path)]))
    # JobSet starts the hosts, and MaxText's tiers use the RAM disk of the pods.
    assert config.world.hosts == 1
    assert config.tiers.enable_multi_tier_checkpointing
    # What the probe reads is there.
    probe = jobsets.program(built)["livenessProbe"]
    assert probe["httpGet"]["port"] == config.metrics.prometheus_port == 9400
    assert config.metrics.prometheus_interface == "0.0.0.0"
    mounts = jobsets.program(built)["volumeMounts"]
    ram = config.tiers.local_checkpoint_directory
    assert ram in [mount["mountPath"] for mount in mounts]


def test_supervisors_of_maxtext_are_those_of_the_trainer(tmp_path):
    ours = ["termination_grace_period_seconds=90", "peer_copies=1"]
    ours += ["prometheus_port=9400"]
    built = documents("maxtext_elastic_h100", *ours)
    ((name, text),) = jobsets.only("ConfigMap", built)["data"].items()
    path = tmp_path / name
    path.write_text(text)
    config = maxtext_keys.supervised(maxtext_keys.given([str(path)]))
    of_train = documents("elastic_h100", *ours)
    same = jobsets.configured(of_train, tmp_path)
    assert config.elastic == dataclasses.replace(
        same.elastic, elastic_compile_ahead_seconds=0
    )
    assert (config.tiers, config.metrics, config.world) == (
        same.tiers,
        same.metrics,
        same.world,
    )
    assert configured.limits(config).grace_secs == configured.limits(same).grace_secs
    assert config.data.global_batch_size == 192
    # Their pods differ in the command and in what the tokenizer is mounted with.
    (pods, of_train) = (jobsets.jobs(each)["hosts"] for each in (built, of_train))
    assert pods.keys() == of_train.keys()
    for key in pods.keys() - {"template"}:
        assert pods[key] == of_train[key]


def test_without_tpus_all_slices_are_the_one_job_in_which_jax_counts_hosts(monkeypatch):
    from jax._src.clusters import k8s_cluster

    for slices in (1, 4):
        (job,) = jobsets.jobs(documents(GPU, f"slices={slices}")).values()
        answer = types.SimpleNamespace(spec=types.SimpleNamespace(**job))
        of_api = classmethod(lambda _, answer=answer: answer)
        monkeypatch.setattr(k8s_cluster.K8sCluster, "_job", of_api)
        assert k8s_cluster.K8sCluster.get_process_count() == 4
        # Each pod learns its place from the index of an indexed Job.
        assert job["completionMode"] == "Indexed"


def test_tpu_machines_are_what_pathwaysutils_takes_them_for():
    from pathwaysutils.experimental.gke import jobset as pathways_jobset

    labels = pathways_jobset.MACHINE_TYPE_TO_GKE_ACCELERATOR_TYPE_MAP
    assert machine._TPUS.keys() == {name for name in labels if "-" in name}
    for name, tpu in machine._TPUS.items():
        assert tpu.label == labels[name]
    # The largest slice of one of them.
    setting = [f"machine_type={name}", f"topology={tpu.topologies[-1]}", "slices=2"]
    (ours,), (_, theirs) = (
        jobsets.jobs(documents(kind, *setting, "global_batch_size=1024")).values()
        for kind in (TPU, PATHWAYS)
    )
    assert ours["completions"] == theirs["completions"]
    pods = [job["template"]["spec"] for job in (ours, theirs)]
    assert pods[0]["nodeSelector"] == pods[1]["nodeSelector"]
    limits = [each["containers"][0]["resources"]["limits"] for each in pods]
    assert limits[0] == limits[1]
