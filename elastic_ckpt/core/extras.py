"""Imports packages that only an extra of elastic_ckpt installs."""

from __future__ import annotations

import importlib
from typing import Any

from elastic_ckpt.core import errors


def hint(extra: str) -> str:
    """Says how to install an extra; elastic_ckpt is not on any package index."""
    return (
        f"run `pip install '.[{extra}]'` in a clone of elastic_ckpt (or uv run --extra"
        f" {extra} elastic-ckpt ...)"
    )


def module(name: str, *, extra: str, otherwise: str) -> Any:
    """Imports a module from a package that an extra installs.

    Raises:
      ConfigError: if the import fails. The message names the package and the extra and
        ends with the alternative `otherwise`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-").lower()
        raise errors.ConfigError(
            f"the package {package} cannot be imported ({error}); to install"
            f" it, {hint(extra)}, or {otherwise}"
        ) from None
