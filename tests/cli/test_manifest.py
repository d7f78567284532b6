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


def test_data_that_no_volume_has_is_noted():
    config = SHIPPED / "multicontroller_h100.yml"
    files = "grain_train_files=/data/x"
    note = "elastic-ckpt manifest: pod_volumes mounts no volume for /data/x"
    assert note in runs.verb("manifest", config, files)
    volume = "pod_volumes={/data: {persistentVolumeClaim: {claimName: texts}}}"
    assert note not in runs.verb("manifest", config, files, volume)
