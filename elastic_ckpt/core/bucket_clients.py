"""The clients of object stores, which are installed by extras and set up before use."""

from __future__ import annotations

import functools
import importlib.util

from elastic_ckpt.core import errors

# The package that reads and writes under a protocol, and the extra that installs it.
_CLIENTS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}


def prepare(url: str) -> None:
    """Sets up the client for `url`; does nothing for protocols that are not known here.

    Raises:
      ConfigError: if it is not installed.
    """
    protocol = url.partition("://")[0]
    if protocol in _CLIENTS:
        _prepare_protocol(protocol)


@functools.cache
def _prepare_protocol(protocol: str) -> None:
    package, extra = _CLIENTS[protocol]
    if importlib.util.find_spec(package) is None:
        raise errors.ConfigError(
            f"{protocol}:// needs the extra `{extra}`: pip install"
            f" 'elastic-ckpt[{extra}]'"
        )
    # Not before it is needed: it takes a while.
    import fsspec.config

    # Clients keep listings, which hides what other processes have written since.
    settings = fsspec.config.conf.setdefault(protocol, {})
    settings.setdefault("use_listings_cache", False)
