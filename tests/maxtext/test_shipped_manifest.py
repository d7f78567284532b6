"""The programs of the shipped manifests for MaxText start, with runs in a bucket."""

import json
import pathlib
import socket
import subprocess

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.deploy import slurm
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import load, run_audit
from tests import runs, shared_memory
from tests.deploy import fake_slurm, jobsets, local_pods
from tests.deploy import test_started_manifests as started
from tests.maxtext import environment, test_real_maxtext

TOKENIZER = environment.TOKENIZERS / "qwen3-tokenizer" / "tokenizer.json"


@pytest.mark.night
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_host_of_the_shipped_manifest_comes_to_its_first_device(
    bucket, corpus, tmp_path
):
    environment.set_up()
    content = pathlib.Path(corpus).read_bytes()
    storage.write_atomic(f"{bucket}/data/texts.array_record", content)
    with shared_memory.directory("pods") as ram, socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        free.bind(("127.0.0.1", 0))
        replaced = {
            "gs://my-bucket": bucket,
            "/local": ram,
            "/models/llama/tokenizer.json": str(TOKENIZER),
        }
        (program, *words), variables = started.container_of(
            "maxtext_v6e", replaced, tmp_path
        )
        assert program == "elastic-ckpt"
        python = environment.ENVIRONMENT / "bin" / "python"
        ended = subprocess.run(
            [python, "-m", "elastic_ckpt.cli.main", *words],
            cwd=environment.ROOT,
            env={
                **runs._environment(),
                **variables,
                "DECOUPLE_GCLOUD": "TRUE",
                # A host of TPUs, which JAX finds by Slurm as it has no TPU.
                "JAX_PLATFORMS": "tpu,cpu",
                "JAX_COORDINATOR_PORT": str(free.getsockname()[1]),
                "SLURM_JOB_ID": "1",
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS": "1",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "localhost",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert started.LACKING["tpu"] in ended.stderr, ended.stdout + ended.stderr


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


@pytest.mark.slow
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


@pytest.mark.night
def test_the_supervisors_of_a_slurm_job_run_maxtext_together(corpus, tmp_path):
    environment.set_up()
    variables = {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with shared_memory.directory("slurm") as ram:
        config = write_config(
            tmp_path,
            "slurm_h100",
            base_output_directory=str(tmp_path),
            slurm_ram_directory=ram,
            slurm_gres="",
            slurm_setup=f"source {environment.ENVIRONMENT}/bin/activate",
            pod_env=variables,
            maxtext=of_program(corpus),
        )
        script = slurm.script(load.load(config))
        job = fake_slurm.start(script, tmp_path)
        output, _ = job.communicate()
        assert job.returncode == 0, output
    check_run(tmp_path / "tiny")
