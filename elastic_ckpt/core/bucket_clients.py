"""The clients of object stores: installed by extras, set up before use, and failing."""

from __future__ import annotations

import functools
import importlib.util
import sys

from elastic_ckpt.core import errors

# The package that reads and writes under a protocol, and the extra that installs it.
_CLIENTS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}

# What clients raise besides OSErrors, by module.
_FAILURES = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
}


def failures() -> tuple[type[Exception], ...]:
    """What is raised where storage is out of reach, or refuses what it is asked for.

    OSErrors, and what the clients that this process uses raise besides; made anew for
    each `except` clause, since clients are imported when they are needed.
    """
    of_clients = [
        getattr(sys.modules[module], name)
        for module, names in _FAILURES.items()
        if module in sys.modules
        for name in names
    ]
    return (OSError, *of_clients)


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
