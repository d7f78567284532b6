"""A configuration as the YAML that `kubectl apply` takes."""

from __future__ import annotations

import yaml

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import job, multicontroller_jobset, pathways_jobset


def documents(config: schema.Config) -> list[job.Object]:
    """The objects of the run, in the order in which the cluster should get them.

    Raises:
      ConfigError: if a value is invalid, naming it and what to set instead.
    """
    if not config.run.run_name:
        raise errors.ConfigError(
            "run_name is empty, and names the job; set it, for example run_name=first"
        )
    if config.world.enable_single_controller:
        return pathways_jobset.documents(config)
    return multicontroller_jobset.documents(config)


def to_yaml(objects: list[job.Object]) -> str:
    """`objects` as one YAML text."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
