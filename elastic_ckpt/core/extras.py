"""Imports packages that only the extras of this distribution install."""

from __future__ import annotations

import importlib
from typing import Any

from elastic_ckpt.core import errors


def module(name: str, *, extra: str, otherwise: str) -> Any:
    """The module `name`, imported at the first call.

    Args:
      name: its full name.
      extra: the extra of this distribution that installs its package.
      otherwise: what to set instead, for the message.

    Raises:
      ConfigError: if it cannot be imported; names the package, the extra and
        `otherwise`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-").lower()
        raise errors.ConfigError(
            f"the package {package} cannot be imported ({error}); install it with"
            f" `pip install elastic-ckpt[{extra}]`, or {otherwise}"
        ) from None
