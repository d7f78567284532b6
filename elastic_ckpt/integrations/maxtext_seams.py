"""The functions of MaxText that ours take the place of, and whether they are there."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
from collections.abc import Collection
from importlib import metadata
from typing import Any

from elastic_ckpt.core import errors
from elastic_ckpt.integrations import maxtext_config

# The version in which they are known, and that is tested.
TESTED_VERSION = "0.2.5"

_TRAIN = "maxtext.trainers.pre_train.train"
_CONFIG = "maxtext.configs.pyconfig"
_CONFIG_TYPES = "maxtext.configs.types"
_INPUT = "maxtext.input_pipeline.input_pipeline_interface"
_CHECKPOINTING = "maxtext.common.checkpointing"
_METRICS = "maxtext.common.metric_logger"
_ITERATOR_STATE = "maxtext.common.grain_utility"
_MAX_UTILS = "maxtext.utils.max_utils"
_TRAIN_UTILS = "maxtext.utils.train_utils"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seam:
    """A function of MaxText that is looked up when it is called.

    Attributes:
      module: where it is.
      name: what it is called.
      parameters: the names of its first parameters.
      caller: module and name of the function that calls it by this name.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    caller: tuple[str, str] | None = None


MAIN = Seam(module=_TRAIN, name="main", parameters=("argv",))
# Our keys are taken out before MaxText checks its own.
PREPARE = Seam(
    module=_CONFIG,
    name="_prepare_for_pydantic",
    parameters=("raw_keys",),
    caller=(_CONFIG, "_initialize_pydantic"),
)
# It would wait for GKE's replicator, which our tiers do without.
JOIN_WITH_REPLICATOR = Seam(
    module=_MAX_UTILS,
    name="initialize_multi_tier_checkpointing",
    parameters=("local_checkpoint_directory",),
    caller=(_MAX_UTILS, "maybe_initialize_jax_distributed_system"),
)
# Ours return our iterators.
MAKE_TRAIN = Seam(
    module=_INPUT,
    name="make_grain_train_iterator",
    parameters=("config", "global_mesh", "process_indices"),
    caller=(_INPUT, "create_data_iterator"),
)
MAKE_EVAL = dataclasses.replace(MAKE_TRAIN, name="make_grain_eval_iterator")
# The state of our iterator is a checkpointable of Orbax v1, handed on as it is.
FOR_SAVE = Seam(
    module=_ITERATOR_STATE,
    name="for_save",
    parameters=("step", "data_iterator", "expansion_factor_real_data"),
    caller=(_CHECKPOINTING, "save_checkpoint"),
)
FOR_RESTORE = Seam(
    module=_ITERATOR_STATE,
    name="for_restore",
    parameters=(
        "checkpoint_manager",
        "step",
        "data_iterator",
        "expansion_factor_real_data",
    ),
    caller=(_CHECKPOINTING, "load_state_if_possible"),
)
# With tiers the run has our checkpointer.
MAKE_CHECKPOINTER = Seam(
    module=_TRAIN_UTILS,
    name="create_checkpoint_manager",
    parameters=("config", "mesh", "init_state_fn"),
    caller=(_TRAIN_UTILS, "setup_train_loop"),
)
# During a ramp our iterator changes the size of its batches; MaxText's own loader would
# cut them out of larger ones, and hold rows that no checkpoint has.
MAKE_LOADER = Seam(
    module=_TRAIN_UTILS,
    name="create_dataloader",
    parameters=(
        "config",
        "mesh",
        "data_iterator",
        "goodput_recorder",
        "rampup_manager",
    ),
    caller=(_TRAIN_UTILS, "setup_train_loop"),
)
# The last step is saved if the data ends before `steps`.
SAVE_STEP = Seam(
    module=_CHECKPOINTING,
    name="maybe_save_checkpoint",
    parameters=("checkpoint_manager", "state", "config", "data_iterator", "step"),
    caller=(_TRAIN, "training_loop_iteration"),
)
# Only in elastic runs: whether the hosts leave the world.
REACHED_PREEMPTION = Seam(
    module=_CHECKPOINTING,
    name="reached_preemption",
    parameters=("checkpoint_manager", "step"),
    caller=(_CHECKPOINTING, "_handle_post_checkpoint_preemption"),
)
# Each step is an event, too.
MAKE_LOGGER = Seam(
    module=_METRICS,
    name="MetricLogger",
    parameters=("config", "learning_rate_schedule", "start_step"),
    caller=(_TRAIN, "train_loop"),
)
SEAMS = (
    MAIN,
    PREPARE,
    JOIN_WITH_REPLICATOR,
    MAKE_TRAIN,
    MAKE_EVAL,
    FOR_SAVE,
    FOR_RESTORE,
    MAKE_CHECKPOINTER,
    MAKE_LOADER,
    SAVE_STEP,
    REACHED_PREEMPTION,
    MAKE_LOGGER,
)


def check_installed(given: Collection[str] = ()) -> None:
    """Checks that the MaxText that is installed has every seam, and some keys.

    Args:
      given: keys that a user has set. Most of MaxText, which takes long to import, is
        only imported if they are known.

    Raises:
      ConfigError: naming what is missing, or the key that is not known.
    """
    try:
        version = metadata.version("maxtext")
    except metadata.PackageNotFoundError:
        raise errors.ConfigError(
            "MaxText is not installed beside elastic_ckpt; make the environment that"
            " docs/pages/guides/maxtext.md describes, and run this in it"
        ) from None
    _point_to_assets()
    missing = sorted(set(maxtext_config.MAXTEXT_KEYS) - set(known_keys()))
    if missing:
        _refuse(version, f"has no key {', '.join(missing)}")
    maxtext_config.check_known(given, known_keys())
    for seam in SEAMS:
        function = _lookup(seam.module, seam.name)
        if function is None:
            _refuse(version, f"has no {seam.module}.{seam.name}")
        names = tuple(inspect.signature(function).parameters)
        if names[: len(seam.parameters)] != seam.parameters:
            _refuse(
                version,
                f"calls {seam.module}.{seam.name} with {', '.join(names)} instead of"
                f" {', '.join(seam.parameters)}",
            )
        if seam.caller:
            caller = inspect.unwrap(_lookup(*seam.caller) or _nothing)
            if seam.name not in getattr(caller, "__code__", _nothing.__code__).co_names:
                caller = ".".join(seam.caller)
                _refuse(version, f"does not call {seam.name} in {caller}")


def known_keys() -> Collection[str]:
    """The keys of the MaxText that is installed."""
    return getattr(_lookup(_CONFIG_TYPES, "MaxTextConfig"), "model_fields", {}).keys()


def _point_to_assets() -> None:
    # An installed MaxText looks for its tokenizers where a clone has them.
    package = importlib.util.find_spec("maxtext")
    places = package.submodule_search_locations if package else None
    for place in places or ():
        assets = os.path.join(place, "assets")
        if os.path.isdir(assets):
            os.environ.setdefault("MAXTEXT_ASSETS_ROOT", assets)


def _lookup(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return None
        raise


def _nothing() -> None:
    pass


def _refuse(version: str, what: str) -> None:
    raise errors.ConfigError(
        f"MaxText {version} {what}: elastic_ckpt supports MaxText {TESTED_VERSION};"
        f" install maxtext=={TESTED_VERSION} by docs/pages/guides/maxtext.md,"
        " or a newer elastic_ckpt"
    )
