"""The clients of object stores: their extras, their settings and their errors."""

from __future__ import annotations

import functools
import importlib.util
import sys

from elastic_ckpt.core import errors

# The client package of each protocol, and the extra that installs it.
_CLIENTS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}

# The exceptions that clients raise besides OSErrors, by module.
_FAILURES = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
}


def failures() -> tuple[type[Exception], ...]:
    """The exceptions of storage that is unreachable or rejects a request.

    These are OSError and the exceptions of the clients that this process has imported.
    Call it in each `except` clause, because clients are imported when they are needed.
    """
    client_errors = [
        getattr(sys.modules[module], name)
        for module, names in _FAILURES.items()
        if module in sys.modules
        for name in names
    ]
    return (OSError, *client_errors)


def prepare(url: str) -> None:
    """Sets up the client for `url`; does nothing for other protocols than gs and s3.

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
    # Imported only when needed: the import is slow.
    import fsspec.config

    # Clients cache listings, which would hide files that other processes write.
    settings = fsspec.config.conf.setdefault(protocol, {})
    settings.setdefault("use_listings_cache", False)
