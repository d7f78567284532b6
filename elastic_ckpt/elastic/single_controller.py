"""Makes this process the head: the only program, which controls hosts by Pathways."""

from __future__ import annotations

from elastic_ckpt.core import errors, extras


def check_installed(setting: str) -> None:
    """Raises a ConfigError if pathwaysutils is not installed.

    Args:
      setting: that needs it.
    """
    try:
        import pathwaysutils  # noqa: F401
    except ImportError:
        raise errors.ConfigError(
            f"{setting} needs the extra `pathways`; install it,"
            f" {extras.hint('pathways')}"
        ) from None


def initialize() -> None:
    """Configures JAX for Pathways; must be called before any other use of JAX.

    Raises:
      ConfigError: if this process was not started beside a Pathways proxy, or the extra
        `pathways` is not installed.
    """
    check_installed("enable_single_controller=true")
    import pathwaysutils

    if not pathwaysutils.is_pathways_backend_used():
        raise errors.ConfigError(
            "enable_single_controller=true, but JAX_PLATFORMS does not contain `proxy`:"
            " start the run with the JobSet of configs/deploy/base/pathways, which sets"
            " it, or set enable_single_controller=false"
        )
    pathwaysutils.initialize()
