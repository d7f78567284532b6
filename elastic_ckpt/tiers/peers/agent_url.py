"""URLs of agents, checked where they are given."""

from __future__ import annotations

import re

from elastic_ckpt.core import errors

_URL = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:([0-9]{1,5}))?/v1/[A-Za-z0-9%._~-]+"
)


def check(url: object, *, what: str, needs_tls: bool = False) -> None:
    """Checks that `url` is the URL of an agent, as an agent prints it.

    Args:
      url: that a person gave.
      what: it was given as, for the message.
      needs_tls: whether it has to be of `https://`.

    Raises:
      ConfigError: if it is not.
    """
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    if match is None or not 0 < int(match[3] or 80) < 2**16:
        raise errors.ConfigError(
            f"{what} has {url!r}, which is not the URL of an agent; give it as the"
            " agent prints it, such as http://10.0.0.7:8470/v1/my_run"
        )
    if needs_tls and not match[0].startswith("https://"):
        raise errors.ConfigError(
            f"{what} has {url!r}, which does not encrypt, and this run does; give the"
            " https:// URL of an agent that was started with a certificate"
        )
