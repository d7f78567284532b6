"""Object-store clients: their extras, settings and errors."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from typing import Any

from elastic_ckpt.core import errors, extras

# The client package of each protocol, and the extra that installs it.
_CLIENTS = {
    "gs": ("gcsfs", "gcs"),
    "s3": ("s3fs", "s3"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
}

# TensorStore has a driver for these protocols, so checkpoints can use them.
_OF_CHECKPOINTS = ("gs", "s3")

# The exceptions that clients raise in addition to OSErrors, by module.
_FAILURES = {
    "aiohttp.client_exceptions": ("ClientError",),
    "azure.core.exceptions": ("AzureError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError", "ChecksumError", "NonRetryableError"),
    "google.api_core.exceptions": ("GoogleAPIError",),
    "google.auth.exceptions": ("GoogleAuthError",),
}

# Names of exceptions, or of their base classes, that mean that no connection was made.
_UNCONNECTED = {
    "ClientConnectorError",
    "ConnectTimeoutError",
    "ConnectionError",
    "EndpointConnectionError",
    "ServiceRequestError",
}

# TensorStore aborts a transfer that stalls this long and retries it. By default, it
# waits forever.
_STALLED = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def failures() -> tuple[type[Exception], ...]:
    """The exceptions that storage raises if it is unreachable or rejects a request.

    These are OSError and the exceptions of all clients that this process has imported.
    Call this function in each `except` clause, because clients are imported lazily.
    """
    client_errors = [
        getattr(sys.modules[module], name)
        for module, names in _FAILURES.items()
        if module in sys.modules
        for name in names
    ]
    return (OSError, *client_errors)


def modules(url: str) -> list[str]:
    """The modules of the client for `url`; empty if it is not in an object store."""
    package, _ = _CLIENTS.get(url.partition("://")[0], ("", ""))
    return [package] if package else []


def is_bucket(url: str) -> bool:
    """Whether `url` is in an object store."""
    return url.partition("://")[0] in _CLIENTS


def is_connection_failure(error: Exception) -> bool:
    """Whether one of `failures` means that the store could not be connected to."""
    return any(kind.__name__ in _UNCONNECTED for kind in type(error).__mro__)


def prepare(url: str, *, is_data: bool = False) -> None:
    """Sets up the object-store client for `url`; does nothing if `url` needs none.

    Some stores can hold training data (`is_data`) but not checkpoints.

    Raises:
      ConfigError: if the client is not installed, or the store cannot hold checkpoints.
    """
    protocol = url.partition("://")[0]
    if protocol not in _CLIENTS:
        return
    if not is_data and protocol not in _OF_CHECKPOINTS:
        raise errors.ConfigError(
            f"{url}: {protocol}:// can only hold training data, because TensorStore"
            " has no driver for it; put runs and checkpoints in gs://, s3:// or a"
            " mounted directory"
        )
    _prepare_protocol(protocol)


def opened(url: str) -> tuple[Any, str]:
    """The fsspec file system of `url`, and the path in this file system.

    Raises:
      ConfigError: see `prepare`.
    """
    # Imported only when needed: the import is slow.
    import fsspec

    prepare(url)
    return fsspec.url_to_fs(url)


@functools.cache
def _prepare_protocol(protocol: str) -> None:
    package, extra = _CLIENTS[protocol]
    if importlib.util.find_spec(package) is None:
        raise errors.ConfigError(
            f"{protocol}:// needs the `{extra}` extra; to install it,"
            f" {extras.hint(extra)}"
        )
    # Imported only when needed: the import is slow.
    import fsspec.config

    # Clients cache listings, which hides files that other processes write. The cache is
    # turned off for future clients and for clients that the user's program has created.
    settings = fsspec.config.conf.setdefault(protocol, {})
    settings.setdefault("use_listings_cache", False)
    if package in sys.modules and not settings["use_listings_cache"]:
        for client in [*fsspec.get_filesystem_class(protocol)._cache.values()]:
            client.dircache.use_listings_cache = False
            client.dircache.clear()
    for name, value in _STALLED.items():
        os.environ.setdefault(name, value)
    # Clients log errors with tracebacks although they also raise them.
    logger = logging.getLogger(package)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
