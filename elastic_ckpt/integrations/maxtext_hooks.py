"""Everything that we use from MaxText: five functions to replace, and some names.

MaxText has no interface for a library that provides a run's data, checkpoints and
world. It looks up its functions by name at each call, so `maxtext.run` can replace five
of them. Before a run, `check_installed` compares everything listed here with the
installed MaxText.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import metadata
from typing import Any, NoReturn

from absl import app

from elastic_ckpt.core import errors

# The version that has these names and is tested.
TESTED_VERSION = "0.2.5"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    """A MaxText function or class that is replaced or called.

    Attributes:
      parameters: the names of the first parameters.
      caller: the module and name of the function that looks up this one by name.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    caller: tuple[str, str] | None = None

    def look_up(self) -> Any:
        """Returns the object with this name; None if there is none."""
        return _look_up(self.module, self.name)

    def check(self) -> None:
        """Raises a ConfigError if the object is missing or has changed."""
        place = f"{self.module}.{self.name}"
        function = self.look_up()
        if function is None:
            _refuse(f"has no {place}")
        names = tuple(inspect.signature(function).parameters)
        if names[: len(self.parameters)] != self.parameters:
            _refuse(
                f"calls {place} with {', '.join(names)} instead of"
                f" {', '.join(self.parameters)}"
            )
        if self.caller:
            code = getattr(inspect.unwrap(_look_up(*self.caller)), "__code__", None)
            if self.name not in getattr(code, "co_names", ()):
                _refuse(f"does not call {self.name} in {'.'.join(self.caller)}")

    @contextlib.contextmanager
    def replaced(self, by: Callable[..., Any]) -> Iterator[None]:
        """Makes MaxText call `by`, with the original as first argument, in a block."""
        module, original = importlib.import_module(self.module), self.look_up()
        setattr(module, self.name, functools.partial(by, original))
        try:
            yield
        finally:
            setattr(module, self.name, original)


_TRAIN = "maxtext.trainers.pre_train.train"
_CONFIG = "maxtext.configs.pyconfig"
_CHECKPOINTING = "maxtext.common.checkpointing"
_TRAIN_UTILS = "maxtext.utils.train_utils"
_SET_UP = (_TRAIN_UTILS, "setup_train_loop")

# Prepares the keys that MaxText has read, before MaxText checks them.
PREPARE = Hook(
    module=_CONFIG,
    name="_prepare_for_pydantic",
    parameters=("raw_keys",),
    caller=(_CONFIG, "_initialize_pydantic"),
)
MANAGER = Hook(
    module=_TRAIN_UTILS,
    name="create_checkpoint_manager",
    parameters=("config", "mesh"),
    caller=_SET_UP,
)
DATA = Hook(
    module="maxtext.input_pipeline.input_pipeline_interface",
    name="create_data_iterator",
    parameters=("config", "mesh"),
    caller=_SET_UP,
)
# Created after the state is restored and the step compiled.
LOGGER = Hook(
    module="maxtext.common.metric_logger",
    name="MetricLogger",
    parameters=("config", "learning_rate_schedule", "start_step"),
    caller=(_TRAIN, "train_loop"),
)
STOP = Hook(
    module=_CHECKPOINTING,
    name="reached_preemption",
    parameters=("checkpoint_manager", "step"),
    caller=(_CHECKPOINTING, "_handle_post_checkpoint_preemption"),
)
HOOKS = (PREPARE, MANAGER, DATA, LOGGER, STOP)

# The program to run, and its configuration class.
_MAIN = Hook(module=_TRAIN, name="main", parameters=("argv",))
_KEYS = Hook(module="maxtext.configs.types", name="MaxTextConfig")
# MaxText neither saves nor restores an iterator of this class.
STATELESS = Hook(
    module=_CHECKPOINTING,
    name="PlaceHolderDataIterator",
    caller=(_CHECKPOINTING, "load_state_if_possible"),
)
# Yields a ramp's batch sizes, beginning at any step.
RAMP = Hook(
    module="maxtext.utils.rampup_batch",
    name="RampupBatchManager",
    parameters=("config", "step_num"),
)
NAMES = (_MAIN, _KEYS, STATELESS, RAMP)


def run(arguments: Sequence[str]) -> None:
    """Runs MaxText until it raises SystemExit or an error that it does not catch."""
    module = importlib.import_module(_MAIN.module)
    app.run(_MAIN.look_up(), argv=[str(module.__file__), *arguments])


def check_installed() -> None:
    """Raises a ConfigError unless the installed MaxText has every name and hook."""
    for each in (*NAMES, *HOOKS):
        each.check()


def keys() -> Collection[str]:
    """The installed MaxText's keys.

    Raises:
      ConfigError: if MaxText is not installed.
    """
    package = importlib.util.find_spec("maxtext")
    if package is None:
        raise errors.ConfigError(
            "MaxText is not installed next to elastic_ckpt; create the environment that"
            " docs/pages/guides/maxtext.md describes, and run this command in it"
        )
    for place in package.submodule_search_locations or ():
        # An installed MaxText looks for its tokenizers in the directory of a clone.
        os.environ.setdefault("MAXTEXT_ASSETS_ROOT", os.path.join(place, "assets"))
    return getattr(_KEYS.look_up(), "model_fields", {}).keys()


def _look_up(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return None
        raise


def _refuse(what: str) -> NoReturn:
    raise errors.ConfigError(
        f"MaxText {metadata.version('maxtext')} {what}: elastic_ckpt supports MaxText"
        f" {TESTED_VERSION}; install maxtext=={TESTED_VERSION} as described in"
        " docs/pages/guides/maxtext.md, or install a newer elastic_ckpt"
    )
