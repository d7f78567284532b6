"""Checks of names and paths against the rules of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastic_ckpt.core import errors

# RFC 1123, and RFC 1035, which requires a letter first: JobSet creates a service with
# its own name, and RFC 1035 applies to the names of services.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_CHARACTERS = 63


def refuse(condition: object, message: str) -> None:
    """Raises a ConfigError with `message` if `condition` holds."""
    if condition:
        raise errors.ConfigError(message)


def check_jobset_name(
    run_name: str, replicated_jobs: Mapping[str, tuple[int, int]]
) -> None:
    """Raises a ConfigError unless `run_name` is valid as the name of a JobSet.

    The names of its pods, which begin with it, must be valid, too.

    Args:
      run_name: the name of the run.
      replicated_jobs: the number of jobs, and of pods in each, by replicated job.

    Raises:
      ConfigError: suggests a valid name.
    """
    suffixes = [
        f"-{name}-{jobs - 1}-{pods - 1}"
        for name, (jobs, pods) in replicated_jobs.items()
    ]
    room = _CHARACTERS - max(map(len, suffixes))
    if _SERVICE_NAME.fullmatch(run_name) and len(run_name) <= room:
        return
    near = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).lstrip("-0123456789")
    near = near[:room].strip("-") or "run"
    raise errors.ConfigError(
        f"run_name={run_name!r} is not valid as the name of a JobSet: at most {room}"
        " letters a to z, digits and hyphens, a letter first and no hyphen last; set"
        f" run_name={near}"
    )


def check_name(key: str, value: str, *, dots: bool = False) -> None:
    """Raises a ConfigError unless `value` is a name; with `dots` it may have dots."""
    parts = value.split(".") if dots else [value]
    refuse(
        not all(_NAME.fullmatch(part) for part in parts) or len(value) > _CHARACTERS,
        f"{key}={value!r} is not a valid Kubernetes name: use at most"
        f" {_CHARACTERS} letters a to z, digits and hyphens, with no hyphen first"
        " or last",
    )


def check_image(key: str, value: str) -> None:
    """Raises a ConfigError unless `value` names an image and its version."""
    repository, _, tag = value.rpartition(":")
    refuse(
        not repository or not tag or "/" in tag or re.search(r"\s", value),
        f"{key}={value!r} does not name an image and its version; push one"
        " (docs/pages/guides/kubernetes.md) and write registry/repository:tag",
    )


def check_mount(key: str, value: str) -> None:
    """Raises a ConfigError unless `value` is an absolute path that may be mounted."""
    refuse(
        not re.fullmatch(r"(/[\w.-]+)+", value) or value in ("/tmp", "/dev/shm"),
        f"{key}={value!r} cannot be mounted; write an absolute path that nothing"
        " else uses, for example /local, or leave it empty",
    )
