"""The values of all keys, as templates and programs take them.

`config` keeps a list or a mapping as the text of its JSON. A value that was written as
text in the configuration file is read as YAML.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import yaml

from elastic_ckpt.core import errors, sections
from elastic_ckpt.training import keys, schema

# Operators of a shell, which would be arguments of the program.
_OF_A_SHELL = re.compile(r"[|;&<>]+|\$\(|`")


def values(config: schema.Config) -> dict[str, Any]:
    """The value of each key: a list or a mapping, where it is for one.

    Raises:
      ConfigError: if a value is of another kind.
    """
    return {
        key: _READERS[key](key, value) if key in _READERS else value
        for key, value in keys.values(config).items()
    }


def mapping(key: str, value: str) -> dict[str, Any]:
    """The mapping that `value` of `key` is; an empty one for an empty value.

    Raises:
      ConfigError: if it is no mapping.
    """
    read = _read(key, value)
    if not isinstance(read, dict):
        raise errors.ConfigError(
            f"{key} takes a mapping, such as {{name: value}}, not {value}"
        )
    return {str(name): each for name, each in read.items()}


def sequence(key: str, value: str) -> list[Any]:
    """The list that `value` of `key` is; an empty one for an empty value.

    Raises:
      ConfigError: if it is no list.
    """
    read = _read(key, value) or []
    if not isinstance(read, list):
        raise errors.ConfigError(f"{key} takes a list, such as [a, b], not {value}")
    return read


def names(key: str, value: str) -> list[str]:
    """The list of texts that `value` of `key` is.

    Raises:
      ConfigError: if it is no list, or a member is no text.
    """
    read = sequence(key, value)
    for each in read:
        if not isinstance(each, str):
            raise errors.ConfigError(f"{key} takes a list of names, not {each!r}")
    return read


def arguments(key: str, value: str) -> list[str]:
    """The arguments of a command: a list, or a text split as a shell would split it.

    Raises:
      ConfigError: if the text needs a shell, or a quote is not closed.
    """
    if value.startswith("["):
        return [text(each) for each in sequence(key, value)]
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise errors.ConfigError(f"{key}={value!r} cannot be split: {error}") from None
    operators = [word for word in words if _OF_A_SHELL.match(word)]
    if operators:
        raise errors.ConfigError(
            f"{key}={value!r} has {operators[0]!r}, which only a shell understands;"
            f" write [sh, -c, '...'] to start one"
        )
    return words


def text(value: object) -> str:
    """`value` as YAML writes it: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(key: str, value: str) -> Any:
    if not value:
        return {}
    try:
        return sections.Loader(value).get_single_data()
    except yaml.YAMLError as error:
        raise errors.ConfigError(f"{key} is not YAML: {error}") from None


_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("command", "python_module"), arguments),
    **dict.fromkeys(("pod_tolerations", "manifest_patches"), sequence),
    **dict.fromkeys(("pod_image_pull_secrets", "pod_env_secrets"), names),
    **dict.fromkeys(
        (
            "maxtext",
            "pod_affinity",
            "pod_annotations",
            "pod_env",
            "pod_labels",
            "pod_liveness_probe",
            "pod_node_selector",
            "pod_security_context",
            "pod_startup_probe",
            "pod_volumes",
            "program_security_context",
            "slurm_options",
        ),
        mapping,
    ),
}
