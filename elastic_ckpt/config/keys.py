"""The keys of all sections together, and their values; `configs/base.yml` as text."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from elastic_ckpt.config import schema


def sections() -> dict[str, Any]:
    """Each section's name and its defaults."""
    defaults = schema.Config()
    return {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(schema.Config)
    }


def keys() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Each key's section name and field, in the order of definition."""
    found: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for name, section in sections().items():
        for field in dataclasses.fields(section):
            assert field.name not in found, f"{field.name} stands in two sections"
            found[field.name] = (name, field)
    return found


def values(config: schema.Config) -> dict[str, schema.Value]:
    """`config` as a flat dictionary of every key."""
    return {
        name: getattr(getattr(config, section), name)
        for name, (section, _) in keys().items()
    }


def base_yaml() -> str:
    """The text of `configs/base.yml`: every key with its meaning and its default."""
    lines = [
        "# Every key with its default, written from elastic_ckpt/config/schema.py; a",
        "# test compares them. Begin your own file with `base_config: base.yml`.",
    ]
    described = ""
    for name, (section, field) in keys().items():
        if section != described:
            title = (type(sections()[section]).__doc__ or "").splitlines()[0]
            lines += ["", f"######## {title}"]
            described = section
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


def render(value: schema.Value) -> str:
    """`value` as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
