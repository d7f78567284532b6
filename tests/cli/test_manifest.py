import pathlib

import yaml

from tests import runs

SHIPPED = pathlib.Path(__file__).parents[2] / "configs" / "deploy"


def test_overrides_come_last_and_the_file_is_written_whole(tmp_path):
    path = tmp_path / "job.yaml"
    config = SHIPPED / "multicontroller_v6e.yml"
    assert runs.verb("manifest", config, "slices=3", "--output", path) == ""
    *_, jobset = yaml.safe_load_all(path.read_text())
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 3
