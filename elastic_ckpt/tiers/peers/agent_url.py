"""URLs of agents, checked where they are given."""

from __future__ import annotations

import re

from elastic_ckpt.core import errors

_URL = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_MOST_PORT = 2**16 - 1


def is_url(url: object) -> bool:
    """Whether `url` is the URL of an agent, without a certificate."""
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    return match is not None and 0 < int(match[1] or 80) <= _MOST_PORT


def check(url: object, *, what: str, needs_tls: bool = False) -> None:
    """Checks that `url` is the URL of an agent, as an agent prints it.

    Args:
      url: that a person or another machine gave.
      what: it was given as, for the message.
      needs_tls: whether it has to be of `https://`.

    Raises:
      ConfigError: if it is not.
    """
    if not is_url(url):
        raise errors.ConfigError(
            f"{what} has {url!r}, which is not the URL of an agent; give it as the"
            " agent prints it, such as http://10.0.0.7:8470"
        )
    if needs_tls and not str(url).startswith("https://"):
        raise errors.ConfigError(
            f"{what} has {url!r}, which does not encrypt, and this run does; give the"
            " https:// URL of an agent that was started with a certificate"
        )
