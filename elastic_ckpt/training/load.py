"""Reads a configuration from a YAML file, its base files and overrides; prints it.

Reading is strict: an unknown key, a key set twice or a value of the wrong type is an
error that gives the file and line and, for an unknown key, the nearest existing key.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml
from etils import epath

from elastic_ckpt.core import errors, sections, storage
from elastic_ckpt.core.sections import Setting, Value, render
from elastic_ckpt.training import schema

# The base file, which has every key's default and need not exist.
DEFAULTS = "base.yml"

_INHERIT = "base_config"
# Renders a key and its value as lines of text.
_Lines = Callable[[dataclasses.Field[Any], Value], list[str]]


def load(path: epath.PathLike, overrides: Sequence[str] = ()) -> schema.Config:
    """The configuration in `path`, with `overrides` on top.

    The result has an attribute for each section, such as `data`, which
    `ec.data.from_config` takes.

    Args:
      path: a YAML file of `key: value` lines, local or in a bucket. Its `base_config`
        is the path, relative to this file, of a file with settings that this file
        lacks. `base_config: base.yml` means the defaults if there is no such file.
      overrides: `key=value` strings, as on a command line; later ones take precedence.

    Raises:
      ConfigError: if a setting is invalid; the message has the file and line (or the
        override) and the remedy.
    """
    return _build(settings(path, overrides))


def settings(
    path: epath.PathLike | None,
    overrides: Sequence[str] = (),
    *,
    bases: Sequence[str] = (),
) -> dict[str, Setting]:
    """The value and origin (file and line, or override) of each key that is set.

    Args:
      path: as in `load`; None if there are only overrides.
      overrides: as in `load`.
      bases: additional directories with base files, such as a different tool's.

    Raises:
      ConfigError: as in `load`, except for unknown keys and invalid values, which only
        `load` checks.
    """
    found: dict[str, Setting] = {}
    if path is not None:
        found = _read_file(storage.absolute(path), bases, below=())
    for override in overrides:
        key, equals, text = override.partition("=")
        place = f"command line, {override!r}"
        if not equals:
            raise errors.ConfigError(f"{place}: use the form key=value")
        try:
            value = yaml.safe_load(text) if text else ""
        except yaml.YAMLError:
            value = text
        found[key] = Setting(value=value, place=place)
    return found


def from_values(values: dict[str, Value], *, place: str) -> schema.Config:
    """The inverse of `values`; `place` is the origin of all keys in error messages.

    Raises:
      ConfigError: if a key is unknown or a value is invalid.
    """
    return _build({k: Setting(value=v, place=place) for k, v in values.items()})


def _read_file(
    path: epath.Path, bases: Sequence[str], *, below: tuple[epath.Path, ...]
) -> dict[str, Setting]:
    if storage.is_local(path):
        path = epath.Path(os.path.realpath(path))
    else:
        # Object names have no `..`.
        store, _, name = os.fspath(path).partition("://")
        path = epath.Path(f"{store}://{os.path.normpath(name)}")
    if path in below:
        raise errors.ConfigError(
            f"{path}: base_config leads back to this file; remove base_config from one"
            " of the files"
        )
    by = f" (base_config of {below[-1]})" if below else ""
    document = sections.compose(path, by=by)
    if document is None:
        return {}
    if not isinstance(document, yaml.MappingNode):
        raise errors.ConfigError(f"{path}, line 1: expected lines of `key: value`")
    found = sections.read_mapping(path, document)
    base = found.pop(_INHERIT, None)
    if base is None:
        return found
    places = [each / str(base.value) for each in (path.parent, *map(epath.Path, bases))]
    if base.value == DEFAULTS and not places[0].exists():
        # An installed package lacks configs/base.yml, which only lists the defaults.
        return found
    # If none exists, the error reports the first.
    below_this = next((each for each in places if each.exists()), places[0])
    return _read_file(below_this, bases, below=(*below, path)) | found


def _build(given: dict[str, Setting]) -> schema.Config:
    values = sections.checked(given, list(keys().values()), also=[_INHERIT])
    return schema.Config(
        **{
            name: dataclasses.replace(
                section, **{key: values[key] for key in vars(section) if key in values}
            )
            for name, section in vars(schema.Config()).items()
        }
    )


def keys() -> dict[str, dataclasses.Field[Any]]:
    """The field of each key, in definition order."""
    return {
        field.name: field
        for section in vars(schema.Config()).values()
        for field in dataclasses.fields(section)
    }


def values(config: schema.Config) -> dict[str, Value]:
    """`config` as a flat dictionary of all keys."""
    return {
        name: value
        for section in vars(config).values()
        for name, value in vars(section).items()
    }


def resolved_yaml(config: schema.Config, origins: Mapping[str, str]) -> str:
    """`config` as a YAML file, with the origin of each key that was set."""

    def lines(field: dataclasses.Field[Any], value: Value) -> list[str]:
        name = field.name
        origin = f"  # {origins[name]}" if name in origins else ""
        return [f"{name}: {render(value)}{origin}"]

    return _by_section(config, lines) + "\n"


def base_yaml() -> str:
    """The content of `configs/base.yml`: every key, its description and default."""

    def lines(field: dataclasses.Field[Any], value: Value) -> list[str]:
        doc = field.metadata["doc"]
        if field.metadata["choices"]:
            doc += f" One of: {', '.join(map(render, field.metadata['choices']))}."
        wrapped = textwrap.wrap(doc, 86, initial_indent="# ", subsequent_indent="# ")
        return ["", *wrapped, f"{field.name}: {render(value)}"]

    return (
        "# Every key with its default, written from elastic_ckpt/training/schema.py\n"
        "# and elastic_ckpt/data/data_keys.py; a test compares them. Start your own\n"
        "# file with `base_config: base.yml`.\n\n"
        + _by_section(schema.Config(), lines)
        + "\n"
    )


def _by_section(config: schema.Config, lines: _Lines) -> str:
    # The lines of each key, under the titles of the sections.
    text: list[str] = []
    for section in vars(config).values():
        text += ["", f"######## {(type(section).__doc__ or '').splitlines()[0]}"]
        for field in dataclasses.fields(section):
            text += lines(field, getattr(section, field.name))
    return "\n".join(text[1:])
