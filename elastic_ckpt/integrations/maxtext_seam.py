"""The seam between MaxText and us: all that we take of MaxText, and check.

MaxText has no place for a library that brings the data, the checkpoints and the world
of a run. It looks functions up by their names when it calls them; `extended` replaces
seven of these by ours, which ask one object, the `Extension`.

`check_installed` compares everything that is named here with the MaxText that is
installed, before a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Protocol

from absl import app

from elastic_ckpt.core import errors
from elastic_ckpt.integrations import maxtext_config

# The version in which they are known, and that is tested.
TESTED_VERSION = "0.2.5"

# The names under which MaxText saves its train state and its iterator.
ITEMS = "items"
ITERATOR = "iter"


class Extension(Protocol):
    """What a run of MaxText asks."""

    def configure(self, raw_keys: dict[str, Any]) -> dict[str, Any]:
        """The keys for MaxText to check, of those that it has read."""

    def create_data_iterator(self, config: Any, mesh: Any) -> tuple[Any, Any]:
        """Iterators of training and of evaluation, which may be None."""

    def create_checkpoint_manager(
        self, config: Any, mesh: Any, create: Callable[[], Any]
    ) -> Any:
        """The manager of checkpoints, which saves the data too.

        Args:
          config: of MaxText.
          mesh: of the run.
          create: makes MaxText's own; None if it saves nothing.
        """

    def wrap_step(self, step: Any) -> Any:
        """The jitted step that is lowered, compiled, and called."""

    def should_stop(self, step: int) -> bool | None:
        """Whether all hosts save this step, from 0, and end; asked several times.

        None leaves the question to MaxText.
        """

    def start(self, config: Any, start_step: int) -> None:
        """Called when the state is restored and the step is compiled."""

    def report(self, step: int, scalars: Mapping[str, Any]) -> bool:
        """Called with the metrics of a step; whether MaxText writes them, too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tie:
    """A function or class of MaxText that is replaced, called or tested for.

    Attributes:
      module: where it is.
      name: what it is called.
      parameters: the names of its first parameters.
      caller: module and name of the function that looks it up by this name.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    caller: tuple[str, str] | None = None

    def look_up(self) -> Any:
        """What has this name; None if nothing has."""
        return _look_up(self.module, self.name)

    def check(self) -> None:
        """Raises a ConfigError if it is not there, or has changed."""
        place = f"{self.module}.{self.name}"
        function = self.look_up()
        if function is None:
            refuse(f"has no {place}")
        names = tuple(inspect.signature(function).parameters)
        if names[: len(self.parameters)] != self.parameters:
            refuse(
                f"calls {place} with {', '.join(names)} instead of"
                f" {', '.join(self.parameters)}"
            )
        if self.caller:
            caller = inspect.unwrap(_look_up(*self.caller) or _nothing)
            if self.name not in getattr(caller, "__code__", _nothing.__code__).co_names:
                refuse(f"does not call {self.name} in {'.'.join(self.caller)}")


_TRAIN = "maxtext.trainers.pre_train.train"
_CONFIG = "maxtext.configs.pyconfig"
_INPUT = "maxtext.input_pipeline.input_pipeline_interface"
_CHECKPOINTING = "maxtext.common.checkpointing"
_METRICS = "maxtext.common.metric_logger"
_RAMP = "maxtext.utils.rampup_batch"
_TRAIN_UTILS = "maxtext.utils.train_utils"
_SET_UP = (_TRAIN_UTILS, "setup_train_loop")

CONFIG = Tie(module="maxtext.configs.types", name="MaxTextConfig")
RAMP = Tie(module=_RAMP, name="RampupBatchManager", parameters=("config", "step_num"))
# Called, too, when the data ends: MaxText ends without a save then.
SAVE_STEP = Tie(
    module=_CHECKPOINTING,
    name="maybe_save_checkpoint",
    parameters=("checkpoint_manager", "state", "config", "data_iterator"),
)

_PREPARE = Tie(
    module=_CONFIG,
    name="_prepare_for_pydantic",
    parameters=("raw_keys",),
    caller=(_CONFIG, "_initialize_pydantic"),
)
_CREATE_DATA = Tie(
    module=_INPUT,
    name="create_data_iterator",
    parameters=("config", "mesh"),
    caller=_SET_UP,
)
_CREATE_MANAGER = Tie(
    module=_TRAIN_UTILS,
    name="create_checkpoint_manager",
    parameters=("config", "mesh", "init_state_fn"),
    caller=_SET_UP,
)
# During a ramp our iterator changes the size of its batches; MaxText's own loader would
# cut them out of larger ones, and hold rows that no checkpoint has.
_CREATE_RAMP = Tie(
    module=_TRAIN_UTILS,
    name="create_rampup_manager",
    parameters=("config", "checkpoint_manager"),
    caller=_SET_UP,
)
_JIT_STEPS = Tie(
    module=_TRAIN_UTILS,
    name="jit_train_and_eval_step",
    parameters=("config", "model", "mesh", "state"),
    caller=(_TRAIN, "train_loop"),
)
_SHOULD_STOP = Tie(
    module=_CHECKPOINTING,
    name="reached_preemption",
    parameters=("checkpoint_manager", "step"),
    caller=(_CHECKPOINTING, "_handle_post_checkpoint_preemption"),
)
_MAKE_LOGGER = Tie(
    module=_METRICS,
    name="MetricLogger",
    parameters=("config", "learning_rate_schedule", "start_step"),
    caller=(_TRAIN, "train_loop"),
)
# MaxText neither saves nor restores an iterator of this class.
_STATELESS = Tie(
    module=_CHECKPOINTING,
    name="PlaceHolderDataIterator",
    caller=(_CHECKPOINTING, "load_state_if_possible"),
)


# The program of MaxText that is run.
MAIN = Tie(module=_TRAIN, name="main", parameters=("argv",))
# What `extended` replaces.
_REPLACED = (
    _PREPARE,
    _CREATE_DATA,
    _CREATE_MANAGER,
    _CREATE_RAMP,
    _JIT_STEPS,
    _SHOULD_STOP,
    _MAKE_LOGGER,
)


def ties() -> tuple[Tie, ...]:
    """What is taken of the MaxText that is installed."""
    return (MAIN, CONFIG, RAMP, SAVE_STEP, _STATELESS, *_REPLACED)


def run(arguments: Sequence[str]) -> None:
    """Runs MaxText to its end, a SystemExit, or to an error that it lets by."""
    module = importlib.import_module(MAIN.module)
    app.run(MAIN.look_up(), argv=[str(module.__file__), *arguments])


def check_installed(given: Collection[str] = ()) -> None:
    """Checks that the MaxText that is installed has every tie, and some keys.

    Args:
      given: keys that a user has set. Most of MaxText, which takes long to import, is
        only imported if they are known.

    Raises:
      ConfigError: naming what is missing, or the key that is not known.
    """
    try:
        metadata.version("maxtext")
    except metadata.PackageNotFoundError:
        raise errors.ConfigError(
            "MaxText is not installed beside elastic_ckpt; make the environment that"
            " docs/pages/guides/maxtext.md describes, and run this in it"
        ) from None
    _point_to_assets()
    missing = sorted(set(maxtext_config.MAXTEXT_KEYS) - set(known_keys()))
    if missing:
        refuse(f"has no key {', '.join(missing)}")
    maxtext_config.check_known(given, known_keys())
    for tie in ties():
        tie.check()


def known_keys() -> Collection[str]:
    """The keys of the MaxText that is installed."""
    return getattr(CONFIG.look_up(), "model_fields", {}).keys()


@contextlib.contextmanager
def extended(extension: Extension) -> Iterator[None]:
    """Has MaxText ask `extension` until the block ends."""
    with contextlib.ExitStack() as stack:
        for tie, function in _replacements(extension).items():
            module = importlib.import_module(tie.module)
            stack.callback(setattr, module, tie.name, tie.look_up())
            setattr(module, tie.name, function)
        yield


def save_last(manager: Any, state: Any, config: Any, data: Any) -> None:
    """Saves the state after the last step, as MaxText does at its end."""
    SAVE_STEP.look_up()(manager, state, config, data)


def ramp(config: Any, num_steps: int) -> Any:
    """MaxText's sizes of batches in a ramp, of which some steps are done."""
    return RAMP.look_up()(config, num_steps)


def stateless_class() -> type:
    """The class of iterators that MaxText does not save."""
    return _STATELESS.look_up()


def _replacements(extension: Extension) -> dict[Tie, Any]:
    originals = {tie: tie.look_up() for tie in _REPLACED}

    def prepare(raw_keys: dict[str, Any], *rest: Any, **more: Any) -> Any:
        return originals[_PREPARE](extension.configure(raw_keys), *rest, **more)

    def create_manager(config: Any, mesh: Any, init_state_fn: Any) -> Any:
        create = functools.partial(
            originals[_CREATE_MANAGER], config, mesh, init_state_fn
        )
        return extension.create_checkpoint_manager(config, mesh, create)

    def no_ramp(config: Any, checkpoint_manager: Any) -> None:
        del config, checkpoint_manager

    def jit_steps(*arguments: Any, **more: Any) -> tuple[Any, Any]:
        step, evaluation = originals[_JIT_STEPS](*arguments, **more)
        return extension.wrap_step(step), evaluation and extension.wrap_step(evaluation)

    def should_stop(checkpoint_manager: Any, step: int) -> bool:
        stops = extension.should_stop(step)
        if stops is None:
            stops = originals[_SHOULD_STOP](checkpoint_manager, step)
        return stops

    def reporting(made: Any) -> Any:
        write = made.write_metrics

        def report(metrics: Any, step: int, metric_type: str = "train") -> None:
            is_of_training = bool(metrics) and metric_type == "train"
            if not is_of_training or extension.report(step, metrics["scalar"]):
                write(metrics, step, metric_type)

        made.write_metrics = report
        return made

    def make_logger(
        config: Any, learning_rate_schedule: Any, start_step: int = 0
    ) -> Any:
        made = originals[_MAKE_LOGGER](config, learning_rate_schedule, start_step)
        extension.start(config, start_step)
        return reporting(made)

    return {
        _PREPARE: prepare,
        _CREATE_DATA: extension.create_data_iterator,
        _CREATE_MANAGER: create_manager,
        _CREATE_RAMP: no_ramp,
        _JIT_STEPS: jit_steps,
        _SHOULD_STOP: should_stop,
        _MAKE_LOGGER: make_logger,
    }


def _point_to_assets() -> None:
    # An installed MaxText looks for its tokenizers where a clone has them.
    package = importlib.util.find_spec("maxtext")
    places = package.submodule_search_locations if package else None
    for place in places or ():
        assets = os.path.join(place, "assets")
        if os.path.isdir(assets):
            os.environ.setdefault("MAXTEXT_ASSETS_ROOT", assets)


def _look_up(module: str, name: str) -> Any:
    # A name may be that of a method of a class.
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return found
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return None
        raise


def _nothing() -> None:
    pass


def refuse(what: str) -> None:
    """Raises a ConfigError about the MaxText that is installed."""
    raise errors.ConfigError(
        f"MaxText {metadata.version('maxtext')} {what}: elastic_ckpt supports MaxText"
        f" {TESTED_VERSION}; install maxtext=={TESTED_VERSION} by"
        " docs/pages/guides/maxtext.md, or a newer elastic_ckpt"
    )
