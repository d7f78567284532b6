"""JSON that users give: metrics, and custom metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core import errors, storage


def text_of(what: str, value: Mapping[str, Any]) -> str:
    """The JSON of metrics or metadata of a user.

    Args:
      what: its name in messages.
      value: as it was given.

    Raises:
      CheckpointError: if it is not JSON.
    """
    try:
        text = storage.canonical_json(dict(value)).decode()
        json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.CheckpointError(
            f"the {what} {str(value)[:200]} are not JSON ({error}); give plain numbers,"
            " such as float(loss), texts, lists and dicts"
        ) from None
    return text
