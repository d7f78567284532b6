"""The callbacks of a run: the configured detectors, and the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events
from elastic_ckpt.training import divergence
from elastic_ckpt.training.callbacks import Callback, Callbacks


def of_run(
    config: schema.Config,
    own: Mapping[str, Callback],
    *,
    emit: events.Emit = events.nobody,
) -> Callbacks:
    """The callbacks of a run: detectors, then those of a key, then those given here.

    Args:
      config: of the run.
      own: by name.
      emit: called for each finding.

    Raises:
      ConfigError: if two have one name, the function of `training_callbacks` cannot be
        found, or the run cannot go back because it saves nothing.
    """
    section = config.divergence
    goes_back = section.divergence_action == "rollback"
    if goes_back and not config.checkpoint.enable_checkpointing:
        raise errors.ConfigError(
            "divergence_action=rollback with enable_checkpointing=false: there would"
            " be no step to go back to; set divergence_action=stop or"
            " enable_checkpointing=true"
        )
    callbacks: dict[str, Callback] = {}
    for more in (
        divergence.from_config(section),
        _imported(section.training_callbacks)(config),
        own,
    ):
        if not isinstance(more, Mapping):
            raise errors.ConfigError(
                f"training_callbacks={section.training_callbacks!r} returned a"
                f" {type(more).__name__}; return a dict of callbacks by name"
            )
        twice = sorted(map(str, callbacks.keys() & more.keys()))
        if twice:
            raise errors.ConfigError(
                f"there are two callbacks of the name {twice[0]!r}; their states are"
                " saved by name, so rename one"
            )
        callbacks |= more
    return Callbacks(callbacks, emit=emit)


def _imported(name: str) -> Callable[[schema.Config], Mapping[str, Any]]:
    if not name:
        return lambda _: {}
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.ConfigError(
            f"training_callbacks={name!r} cannot be imported ({error}); give it as"
            " module:function, with the module on PYTHONPATH on every host"
        ) from error
