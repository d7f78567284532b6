"""The arguments `CONFIG key=value...` of verbs, and how a shell completes them."""

from __future__ import annotations

import argparse

from elastic_ckpt.core import sections
from elastic_ckpt.training import keys


def add_arguments(
    parser: argparse.ArgumentParser, *, example: str, is_required: bool = True
) -> None:
    """Adds a configuration file and overrides.

    Args:
      parser: of the verb.
      example: a configuration file.
      is_required: whether a file has to be named.
    """
    parser.add_argument(
        "config",
        nargs=None if is_required else "?",
        help=f"a YAML file, for example {example}",
    )
    overrides = parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override those of the file",
    )
    # argcomplete calls it.
    overrides.completer = complete  # pyrefly: ignore


def complete(prefix: str, **context: object) -> list[str]:
    """The overrides that begin with `prefix`: keys, then values where they are few."""
    del context
    key, equals, _ = prefix.partition("=")
    known = keys.keys()
    if not equals:
        return [f"{name}=" for name in known if name.startswith(prefix)]
    if key not in known:
        return []
    _, field = known[key]
    choices = field.metadata["choices"] or (
        (True, False) if field.type == "bool" else ()
    )
    texts = [
        value if isinstance(value, str) else sections.render(value) for value in choices
    ]
    return [f"{key}={text}" for text in texts if f"{key}={text}".startswith(prefix)]
