"""Every verb of a run whose data, configuration, files and steps are in a bucket."""

import json

import pytest

from elastic_ckpt.core import storage
from tests import runs


@pytest.fixture
def config(bucket, tmp_path):
    """A configuration in a bucket, of a run on data that `data` writes there."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number} " * 20)
    file = f"{bucket}/data/texts.parquet"
    assert "40 documents" in runs.verb("data", texts, file)
    local = runs.write_config(
        tmp_path,
        file,
        base_output_directory=bucket,
        grain_file_type="parquet",
        num_logical_shards=8,
        steps=8,
    )
    storage.write_atomic(f"{bucket}/config.yml", local.read_bytes())
    return f"{bucket}/config.yml"


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_every_verb_takes_urls(config, bucket):
    run = f"{bucket}/tiny"
    assert f'base_output_directory: "{bucket}"' in runs.verb("config", config)
    assert "4 hosts" in runs.verb("plan", config, "--hosts", "2,4", "--batches", "8")
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASSED" in runs.verb("audit", run)
    assert "PASSED" in runs.verb("verify", run)
    assert json.loads(runs.verb("inspect", run, "--json"))["known"] == [4, 8]
    assert "finished" in runs.verb("status", run)
    assert "wrote" in runs.verb("report", run)
    page = (storage.absolute(run) / "report.html").read_text()
    assert "Loss" in page
    assert "pinned" in runs.verb("pin", f"{run}/checkpoints/4")
    made = f"{bucket}/converted"
    runs.verb("convert", f"{run}/checkpoints/8", made, "--to", "safetensors")
    names = {each.name for each in storage.absolute(made).iterdir()}
    assert any(name.endswith(".safetensors") for name in names)
