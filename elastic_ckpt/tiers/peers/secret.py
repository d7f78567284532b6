"""The run's secret, which permits reading from the agents of its machines.

The secret is in `<root>/secret`, readable only by its owner. The hosts of a new world
agree on a secret through the coordination service, and each host adopts it. The agent,
which outlives worlds, reads the file for each request.
"""

from __future__ import annotations

import os
import re
import secrets
import stat

from etils import epath

from elastic_ckpt.core import errors, storage

# Characters that a header can carry; a secret shorter than 16 could be guessed.
_SECRET = re.compile(r"[!-~]{16,1024}")


def path(root: epath.PathLike) -> str:
    """The secret file of the RAM disk at `root`."""
    return os.path.join(root, "secret")


def new() -> str:
    """A new random secret."""
    return secrets.token_urlsafe(32)


def read_or_create(root: epath.PathLike) -> str:
    """The secret of the RAM disk at `root`, which the first call creates.

    Raises:
      RunError: if anyone but the file's owner may read it or could have written it.
    """
    file = path(root)
    storage.create(file, new().encode(), mode=0o600)
    status = os.stat(file, follow_symlinks=False)
    private = stat.S_ISREG(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != os.geteuid():
        raise errors.RunError(
            f"{file} must be a file that this user owns, with mode 0600; others may"
            " know the run's secret. Delete the file, and a new secret will be created"
        )
    return read(file)


def read(file: epath.PathLike) -> str:
    """The secret in a file, which may end in a newline.

    Raises:
      RunError: if the file is missing or does not contain a secret.
    """
    known = current(file)
    if known is None:
        # The message must not show the file's content.
        raise errors.RunError(
            f"{file} is missing or does not contain a secret; write 16 to 1024 ASCII"
            " characters without spaces to it, for example with `openssl rand -hex 32`"
        )
    return known


def current(file: epath.PathLike) -> str | None:
    """The file's current secret; None if the file is missing or has no secret."""
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            text = opened.read(2048).rstrip("\n")
    except FileNotFoundError:
        return None
    return text if _SECRET.fullmatch(text) else None


def adopt(root: epath.PathLike, secret: str) -> None:
    """Makes `secret` the secret of the RAM disk at `root` and its agent."""
    storage.write_atomic(path(root), secret.encode(), mode=0o600)
