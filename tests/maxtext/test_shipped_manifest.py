"""The program of the shipped manifest for MaxText starts, with its run in a bucket."""

import pathlib
import socket
import subprocess

import pytest

from elastic_ckpt.core import storage
from tests import runs, shared_memory
from tests.deploy import test_started_manifests as started
from tests.maxtext import environment

TOKENIZER = environment.TOKENIZERS / "qwen3-tokenizer" / "tokenizer.json"


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.6)
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
