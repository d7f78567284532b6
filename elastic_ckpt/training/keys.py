"""The keys of all sections, their values, and the text of `configs/base.yml`."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.core.sections import Value, render
from elastic_ckpt.training import schema

# The lines of a key with a value.
_Lines = Callable[[dataclasses.Field[Any], Value], list[str]]


def keys() -> dict[str, dataclasses.Field[Any]]:
    """The field of each key, in the order of definition."""
    return {
        field.name: field
        for section in vars(schema.Config()).values()
        for field in dataclasses.fields(section)
    }


def values(config: schema.Config) -> dict[str, Value]:
    """`config` as a flat dictionary of every key."""
    return {
        name: value
        for section in vars(config).values()
        for name, value in vars(section).items()
    }


def listing() -> str:
    """A line for each key: its default and the first sentence of its description."""

    def lines(field: dataclasses.Field[Any], value: Value) -> list[str]:
        meaning = field.metadata["doc"].partition(". ")[0].rstrip(".")
        return textwrap.wrap(
            f"{field.name}={render(value)}: {meaning}",
            88,
            initial_indent="  ",
            subsequent_indent="      ",
            break_on_hyphens=False,
            break_long_words=False,
        )

    return _by_section(schema.Config(), lines, heading="")


def resolved_yaml(config: schema.Config, origins: Mapping[str, str]) -> str:
    """`config` as a YAML file, with the origin of each key that was set."""

    def lines(field: dataclasses.Field[Any], value: Value) -> list[str]:
        name = field.name
        origin = f"  # {origins[name]}" if name in origins else ""
        return [f"{name}: {render(value)}{origin}"]

    return _by_section(config, lines, heading="######## ") + "\n"


def base_yaml() -> str:
    """The text of `configs/base.yml`: every key with its description and default."""

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
        + _by_section(schema.Config(), lines, heading="######## ")
        + "\n"
    )


def _by_section(config: schema.Config, lines: _Lines, *, heading: str) -> str:
    # The lines of each key, below the titles of the sections.
    text: list[str] = []
    for section in vars(config).values():
        text += ["", heading + (type(section).__doc__ or "").splitlines()[0]]
        for field in dataclasses.fields(section):
            text += lines(field, getattr(section, field.name))
    return "\n".join(text[1:])
