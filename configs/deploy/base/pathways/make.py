"""Writes jobset.yaml beside this file: uv run --with 'pathwaysutils[gke]' make.py.

For other slices, machines or buckets copy this directory, and change the values.
"""

import pathlib

import yaml
from pathwaysutils.experimental.gke.jobset import PathwaysJobSet

IMAGES = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways"
jobset = PathwaysJobSet(
    name="run",
    namespace="default",
    pathways_dir="gs://my-bucket/pathways",  # scratch files of its servers
    tpu_type="ct6e-standard-4t",
    topology="4x4",
    num_slices=2,
    max_restarts=10,
    # For another JAX change the sidecar's image, too (sidecar/Dockerfile).
    pathways_rm_and_worker_image=f"{IMAGES}/server:jax-0.10.0",
    pathways_proxy_image=f"{IMAGES}/proxy_server:jax-0.10.0",
)
command = ["elastic-ckpt", "train", "/etc/elastic-ckpt/run.yml"]
jobset.add_user_workload(image="elastic-ckpt", command=command, name="train")
jobset.add_colocated_python(image="elastic-ckpt-sidecar", shm_size_limit="16Gi")
text = yaml.safe_dump(jobset.to_dict(), sort_keys=False, width=1000)
pathlib.Path(__file__).with_name("jobset.yaml").write_text(text)
