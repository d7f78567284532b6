"""Imports Grain without JAX and Orbax, for a process that does nothing but read data.

They take most of the time and memory of that import. Grain needs Orbax only to save its
iterators, and has tree functions of its own where JAX is missing. Those treat None and
registered classes in another way, so rows would depend on who reads them: here JAX's
functions take their place, and import JAX when the first of them is called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

from absl import logging

_HIDDEN = ("jax", "orbax", "orbax.checkpoint")
_TREES = "grain._src.core.tree_lib"
# Modules that lack these classes without Orbax; the second takes them from the first.
_SAVING = ("grain._src.python.checkpoint.handler", "grain.checkpoint")
_SAVED_BY = ("CheckpointSave", "CheckpointRestore")


def import_grain() -> None:
    """Imports Grain, as a whole if its modules are not those that are known here."""
    known = all(map(_exists, (_TREES, *_SAVING)))
    if not known or any(name in sys.modules for name in ("grain", *_HIDDEN)):
        return
    sys.modules.update(dict.fromkeys(_HIDDEN))  # type: ignore[arg-type]
    # Grain warns that its profiler is missing.
    logger = logging.get_absl_logger()
    logger.disabled = True
    try:
        importlib.import_module("grain")
    finally:
        logger.disabled = False
        for name in _HIDDEN:
            del sys.modules[name]
    trees = sys.modules[_TREES]
    for name, function in list(vars(trees).items()):
        if isinstance(function, types.FunctionType) and function.__module__ == _TREES:
            setattr(trees, name, _with_jax(name))
    for name in _SAVING:
        module = sys.modules[name]
        module.__getattr__ = functools.partial(_with_orbax, module)  # type: ignore[method-assign]


def _exists(name: str) -> bool:
    grain = importlib.util.find_spec("grain")
    if grain is None or not grain.submodule_search_locations:
        return False
    (root, *_) = grain.submodule_search_locations
    _, *path = name.split(".")
    return pathlib.Path(root, *path).with_suffix(".py").exists()


def _with_jax(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_trees_of_jax(), name)(*args, **kwargs)

    return call


@functools.cache
def _trees_of_jax() -> types.ModuleType:
    spec = importlib.util.find_spec(_TREES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_orbax(module: types.ModuleType, name: str) -> Any:
    if name not in _SAVED_BY:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    del module.__getattr__
    return getattr(importlib.reload(module), name)
