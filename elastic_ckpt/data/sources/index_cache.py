"""What was found in files, kept below `$XDG_CACHE_HOME/elastic_ckpt`.

Finding the blocks of a file may take a pass over it, which is made once for each
version of the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from etils import epath

from elastic_ckpt.core import checked_json, digest, errors, storage

_VERSION = 1


def found(
    kind: str, key: storage.Json, find: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What a function finds, or has found before; kept if there is room for it.

    Args:
      kind: of the files: a directory of the cache.
      key: all that the result depends on.
      find: returns it, as JSON.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"{digest.json_digest(key)}.json"
    path = epath.Path(root) / "elastic_ckpt" / kind / name
    with contextlib.suppress(errors.DataError, OSError):
        return checked_json.read(path, what="index", version=_VERSION)
    new = find()
    with contextlib.suppress(OSError):
        storage.write_atomic(path, checked_json.to_bytes(new, version=_VERSION))
    return new
