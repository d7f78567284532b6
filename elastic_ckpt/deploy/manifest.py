"""Generates the YAML for `kubectl apply` from a configuration."""

from __future__ import annotations

import yaml

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import jobset, patch, settings
from elastic_ckpt.deploy.template import Object
from elastic_ckpt.training import schema


def documents(config: schema.Config) -> list[Object]:
    """The objects of the run, in the order in which they are to be created.

    Raises:
      ConfigError: if a value is invalid; names the key and a remedy.
    """
    if not config.run.run_name:
        raise errors.ConfigError(
            "run_name is empty, but it becomes the name of the job; set it, for"
            " example run_name=first"
        )
    patches = settings.sequence("manifest_patches", config.deploy.manifest_patches)
    return patch.patched(jobset.documents(config), patches)


def to_yaml(objects: list[Object]) -> str:
    """`objects` as one YAML stream."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as a literal block, and equal parts out in full."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
