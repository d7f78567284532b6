"""The keys of all sections, their values, and the text of `configs/base.yml`."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.config.key import Value


def sections() -> dict[str, Any]:
    """The default values of each section, by the section's name."""
    defaults = schema.Config()
    return {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(schema.Config)
    }


def keys() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """The section name and field of each key, in the order of definition."""
    fields: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for name, section in sections().items():
        for field in dataclasses.fields(section):
            assert field.name not in fields, f"{field.name} is in two sections"
            fields[field.name] = (name, field)
    return fields


def values(config: schema.Config) -> dict[str, Value]:
    """`config` as a flat dictionary of every key."""
    return {
        name: getattr(getattr(config, section), name)
        for name, (section, _) in keys().items()
    }


def listing() -> str:
    """A line for each key: its default and the first sentence of its description."""
    lines, titled = [], ""
    for name, (section, field) in keys().items():
        if section != titled:
            lines += ["", f"{_title(section)}"]
            titled = section
        default = f"{name}={render(getattr(sections()[section], name))}"
        meaning = field.metadata["doc"].partition(". ")[0].rstrip(".")
        lines += textwrap.wrap(
            f"{default}: {meaning}",
            88,
            initial_indent="  ",
            subsequent_indent="      ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(lines[1:])


def resolved_yaml(config: schema.Config, origins: Mapping[str, str]) -> str:
    """`config` as a YAML file, with the origin of each key that was set."""
    lines, titled = [], ""
    for name, value in values(config).items():
        section, _ = keys()[name]
        if section != titled:
            lines += ["", f"######## {_title(section)}"]
            titled = section
        origin = f"  # {origins[name]}" if name in origins else ""
        lines.append(f"{name}: {render(value)}{origin}")
    return "\n".join(lines[1:]) + "\n"


def base_yaml() -> str:
    """The text of `configs/base.yml`: every key with its description and default."""
    lines = [
        "# Every key with its default, generated from elastic_ckpt/config; a test",
        "# compares them. Start your own file with `base_config: base.yml`.",
    ]
    titled = ""
    for name, (section, field) in keys().items():
        if section != titled:
            lines += ["", f"######## {_title(section)}"]
            titled = section
        doc = field.metadata["doc"]
        if field.metadata["choices"]:
            allowed = ", ".join(render(choice) for choice in field.metadata["choices"])
            doc += f" One of: {allowed}."
        lines += [
            "",
            *textwrap.wrap(doc, 86, initial_indent="# ", subsequent_indent="# "),
        ]
        lines.append(f"{name}: {render(getattr(sections()[section], name))}")
    return "\n".join(lines) + "\n"


def _title(section: str) -> str:
    return (type(sections()[section]).__doc__ or "").splitlines()[0]


def render(value: Value) -> str:
    """`value` in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
