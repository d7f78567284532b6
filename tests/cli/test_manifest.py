import pathlib

import pytest
import yaml

from tests import runs

SHIPPED = pathlib.Path(__file__).parents[2] / "configs" / "deploy"


def test_it_prints_what_the_shipped_manifest_says():
    output = runs.verb("manifest", SHIPPED / "multicontroller_v6e.yml")
    assert output == (SHIPPED / "multicontroller_v6e.yaml").read_text()


def test_overrides_come_last_and_the_file_is_written_whole(tmp_path):
    path = tmp_path / "job.yaml"
    config = SHIPPED / "multicontroller_v6e.yml"
    assert runs.verb("manifest", config, "slices=3", "--output", path) == ""
    *_, jobset = yaml.safe_load_all(path.read_text())
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 3


@pytest.mark.parametrize(
    ("config", "key"), [("demo_cpu.yml", "docker_image="), ("base.yml", "run_name ")]
)
def test_a_configuration_that_cannot_run_there_is_refused_in_one_line(config, key):
    output = runs.verb("manifest", SHIPPED.parent / config, code=1)
    assert output.startswith(f"elastic-ckpt manifest: {key}")
    assert output.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--slurm"]])
def test_memory_tiers_without_a_directory_in_memory_are_refused(options):
    config = SHIPPED / ("slurm_h100.yml" if options else "node_agent_h100.yml")
    unset = "local_checkpoint_directory="
    output = runs.verb("manifest", config, *options, unset, code=1)
    assert "local_checkpoint_directory=''" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ("slurm_h100", "hosts=3 slices=4 elastic_enabled=false", "hosts=3 cannot be"),
        ("slurm_h100", "hosts=2 slices=4 elastic_enabled=false", "hosts=2 cannot be"),
        ("slurm_h100", "global_batch_size=190", "a global batch of 190 rows"),
        ("slurm_h100", "elastic_min_slice_count=3", "elastic_min_slice_count=3"),
        (
            "node_agent_h100",
            "multi_tier_checkpointing_backup_interval_minutes=0",
            "set either multi_tier",
        ),
        ("node_agent_h100", "local_checkpoint_period=0", "enable_multi_tier"),
        ("node_agent_h100", "faults=nonsense", "faults"),
        ("multicontroller_h100", "grain_train_files=", "grain_train_files is empty"),
        ("pathways_v6e", "hosts=3", "hosts=3, but slices=2 of topology=4x4"),
    ],
)
def test_what_train_refuses_is_refused(config, settings, expected):
    options = ["--slurm"] * (config == "slurm_h100")
    path = SHIPPED / f"{config}.yml"
    output = runs.verb("manifest", path, *options, *settings.split(), code=1)
    assert output.startswith(f"elastic-ckpt manifest: {expected}")
    assert output.count("\n") == 1


def test_a_limit_of_nodes_below_that_of_the_run_is_refused():
    config = SHIPPED / "node_agent_h100.yml"
    limit = "node_agent_size_limit=32Gi"
    output = runs.verb("manifest", config, "--nodes", limit, code=1)
    assert "is below local_checkpoint_size_limit=64Gi" in output


def test_data_that_no_volume_has_is_noted():
    config = SHIPPED / "multicontroller_h100.yml"
    files = "grain_train_files=/data/x"
    note = "elastic-ckpt manifest: pod_volumes mounts no volume for /data/x"
    assert note in runs.verb("manifest", config, files)
    volume = "pod_volumes={/data: {persistentVolumeClaim: {claimName: texts}}}"
    assert note not in runs.verb("manifest", config, files, volume)
