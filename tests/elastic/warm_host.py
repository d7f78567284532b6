"""Reports the state of a forked host; imports nothing that it looks for."""

import os
import sys

WANTED = (
    "jax",
    "grain",
    "orbax.checkpoint",
    "optax",
    "tensorstore",
    "elastic_ckpt_sidecar.worker",
)
# It takes most of a second, and only agents serve HTTP.
UNWANTED = ("aiohttp",)


def look_around(place, emit):
    missing = sorted(set(WANTED) - set(sys.modules))
    unwanted = sorted(set(UNWANTED) & set(sys.modules))
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    emit(
        "step_interrupted",
        step=threads,
        path=str(missing + unwanted),
        resume_step=float(place.host),
    )
