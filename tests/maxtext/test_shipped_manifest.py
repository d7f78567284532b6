"""The pods of a shipped manifest run MaxText together, in a bucket."""

import json
import pathlib

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import run_audit
from tests import shared_memory
from tests.deploy import jobsets, local_pods
from tests.maxtext import environment, test_real_maxtext

# Two hosts on CPUs, on a machine each.
SMALL = {
    "run_name": "tiny",
    "steps": 6,
    "hardware": "cpu",
    "devices_per_host": 1,
    "hosts": 2,
    "slices": 2,
    "elastic_min_slice_count": 1,
    "elastic_machine_timeout_seconds": 600,
    "local_checkpoint_period": 2,
}


def of_program(data):
    """The keys of MaxText for a run of `SMALL`."""
    return {
        **test_real_maxtext.MODEL,
        **test_real_maxtext.OURS,
        "base_config": "base.yml",
        "grain_train_files": str(data),
        "grain_record_format": "bytes",
        "per_device_batch_size": 4,
    }


def write_config(directory, name, **settings):
    """A file with a shipped configuration and other values."""
    base = {"base_config": str(jobsets.SHIPPED / f"{name}.yml")}
    path = directory / "config.yml"
    # JSON is YAML.
    path.write_text(json.dumps({**base, **SMALL, **settings}))
    return path


def check_run(run):
    """Both machines were in the one world of a run, which is that of one host."""
    events = run_files.read_events(str(run))
    (world,) = (each for each in events if each["event"] == "world_started")
    assert world["slices"] == [0, 1]
    assert run_audit.RunAudit(str(run)).outcome().passed


class Pods(local_pods.Pods):
    """Pods with MaxText in their image."""

    def _command(self, words):
        return [environment.ENVIRONMENT / "bin" / "elastic-ckpt", *words]

    def _environment(self):
        return environment.variables()


@pytest.mark.night
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_the_supervisors_of_a_manifest_run_maxtext_together(bucket, corpus, tmp_path):
    environment.set_up()
    data = f"{bucket}/data/texts.array_record"
    storage.write_atomic(data, pathlib.Path(corpus).read_bytes())
    with shared_memory.directory("pods") as ram:
        config = write_config(
            tmp_path,
            "maxtext_elastic_h100",
            base_output_directory=bucket,
            machine_type="",
            local_checkpoint_directory=ram,
            maxtext=of_program(data),
        )
        with Pods(config, ram) as pods:
            outputs = [pods.ended(number, may=(0, 1)) for number in (0, 1)]
    assert [code for code, _ in outputs] == [0, 0], outputs
    check_run(pods.run)
