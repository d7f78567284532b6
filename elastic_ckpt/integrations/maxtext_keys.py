"""Converts MaxText's keys to ours: pure functions that import neither MaxText nor JAX.

MaxText rejects unknown keys, and combinations that its own elastic iterator does not
support. So `divide` removes our keys before MaxText checks its configuration, and
`data_keys` and `tiers` convert its keys and ours to our sections.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import data_keys as data_section
from elastic_ckpt.data import datasets
from elastic_ckpt.data.sources import files
from elastic_ckpt.training import load, schema

# MaxText keys that mean the same here: for data,
DATA_KEYS = (
    "add_bos",
    "add_eos",
    "chat_template",
    "chat_template_path",
    "data_shuffle_seed",
    "enable_data_shuffling",
    "eval_interval",
    "eval_steps",
    "grain_eval_files",
    "grain_file_type",
    "grain_packing_type",
    "grain_per_worker_buffer_size",
    "grain_shuffle_buffer_size",
    "grain_train_files",
    "grain_train_mixture_config_path",
    "grain_worker_count",
    "max_segments_per_seq",
    "max_target_length",
    "num_epoch",
    "packing",
    "sft_train_on_completion_only",
    "tokenize_train_data",
    "tokenizer_path",
    "tokenizer_type",
    "train_data_columns",
    "use_sft",
    "use_truncation",
)
# for checkpoint tiers,
TIER_KEYS = (
    "checkpoint_period",
    "enable_checkpointing",
    "enable_multi_tier_checkpointing",
    "local_checkpoint_directory",
    "local_checkpoint_period",
    "max_num_checkpoints_to_keep",
    "multi_tier_checkpointing_backup_interval_minutes",
    "multi_tier_checkpointing_backup_interval_steps",
    "run_name",
    "save_checkpoint_on_completion",
)
# and for elastic training.
ELASTIC_KEYS = (
    "elastic_enabled",
    "elastic_max_retries",
    "elastic_min_slice_count",
    "elastic_timeout_seconds",
)
# Keys that MaxText does not have: for data,
_OWN_DATA_KEYS = (
    "num_logical_shards",
    "max_shard_reads",
    "data_stages",
    "grain_record_format",
    "chat_template_date",
    "corrupt_records",
    "tokenizer_threads",
    "data_read_ahead_batches",
)
_HIDDEN_DATA_KEYS = (*_OWN_DATA_KEYS, "tokenizer_type", "colocated_python_data_input")
# for tiers, the validation of steps before they are saved, and metrics,
_OWN_TIER_KEYS = (
    *(
        field.name
        for field in dataclasses.fields(schema.TiersSection)
        if field.name not in TIER_KEYS
    ),
    "replica_validation",
    "replica_validation_action",
    "prometheus_port",
    "prometheus_interface",
)
# and for the hosts that this program starts.
_OWN_WORLD_KEYS = (
    "hosts",
    "slices",
    "devices_per_host",
    *(
        field.name
        for field in dataclasses.fields(schema.ElasticSection)
        if field.name not in ELASTIC_KEYS
    ),
    # During this period, the hosts save and leave.
    "termination_grace_period_seconds",
)
OWN_KEYS = (*_OWN_DATA_KEYS, *_OWN_TIER_KEYS, *_OWN_WORLD_KEYS)
_OF_SUPERVISOR = (
    *(*OWN_KEYS, *TIER_KEYS, *ELASTIC_KEYS),
    "base_output_directory",
    "enable_rampup_batch_size",
    "enable_single_controller",
    "grain_eval_files",
    "grain_train_files",
    "hardware",
    "per_device_batch_size",
    "steps",
)

_PLACE = "MaxText's configuration"
_ROWS = (
    "it has no effect, because a global batch is {0} times the number of devices; set"
    " {0} instead"
)
_SAME_END = "set it to false; here, all hosts stop at the same batch"
# Keys with a single accepted value, and the remedy for other values.
_REFUSED = {
    "expansion_factor_real_data": (
        -1,
        "keep it at -1; here, any number of hosts can read any checkpoint",
    ),
    "formatting_func_path": ("", "apply the function when you write the files"),
    "generate_padding_batch_train": (False, _SAME_END),
    "generate_padding_batch_eval": (False, _SAME_END),
    "enable_emergency_checkpoint": (
        False,
        "set it to false because such checkpoints have no data state, and set"
        " enable_multi_tier_checkpointing to true",
    ),
    "use_dpo": (
        False,
        "set it to false; MaxText's preference trainer does not save the data state",
    ),
    "use_multimodal": (
        False,
        "set it to false and train on text only, or train on images in your own loop"
        " with ec.data.lm.MultimodalRows",
    ),
    "global_batch_size": (None, _ROWS.format("per_device_batch_size")),
    "global_batch_size_to_load": (None, _ROWS.format("per_device_batch_size")),
    "global_batch_size_to_load_eval": (
        None,
        _ROWS.format("eval_per_device_batch_size"),
    ),
}
_OF_STAGES = ("grain_train_files", "grain_train_mixture_config_path")

# Keys hidden from MaxText: ours, and MaxText keys that it would reject or act on.
Ours = Mapping[str, Any]


def given(arguments: Sequence[str]) -> dict[str, Any]:
    """The keys that are set in MaxText's arguments and in the user's files.

    Args:
      arguments: MaxText's arguments; the first may be a YAML file.

    Raises:
      ConfigError: if the file cannot be read or is not YAML.
    """
    path, overrides = None, arguments
    if arguments and "=" not in arguments[0]:
        path, overrides = arguments[0], arguments[1:]
    for each in overrides:
        if each.startswith("base_config="):
            _refuse(each, "pass the file as the first argument")
    # MaxText's own files, which may be the base of a file.
    package = importlib.util.find_spec("maxtext")
    places = package.submodule_search_locations if package else None
    bases = [os.path.join(os.path.realpath(each), "configs") for each in places or ()]
    settings = load.settings(path, overrides, bases=bases)
    return {key: each.value for key, each in settings.items()}


def check(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Runs the checks that are possible before the rest of MaxText is imported.

    Args:
      given: the keys that a user has set, with their values.
      known: MaxText's keys.

    Raises:
      ConfigError: if a key is unknown or unsupported; the message includes the key and
        the remedy.
      DataError: if data files are missing.
    """
    every = {*known, *OWN_KEYS}
    for key, value in given.items():
        accepted, remedy = _REFUSED.get(key, (value, ""))
        if value != accepted:
            _refuse(f"{key}={value}", remedy)
        # To MaxText, `a.b=1` sets a part of its key `a`.
        if key.split(".")[0] not in every:
            (near,) = difflib.get_close_matches(key, every, n=1, cutoff=0.0)
            raise errors.ConfigError(
                f"{_PLACE}: unknown key {key!r}: neither MaxText nor elastic_ckpt has"
                f" this key; did you mean {near!r}?"
            )
    for key in ("per_device_batch_size", "eval_per_device_batch_size"):
        rows = given.get(key)
        if isinstance(rows, float) and not rows.is_integer():
            # MaxText would load a row for each device and drop some of the rows.
            _refuse(f"{key}={rows}", "set it to an integer number of rows per device")
    for key in ("grain_train_files", "grain_eval_files"):
        for each in datasets.from_list(given.get(key) or "", key=key):
            if each.patterns and storage.is_local(each.patterns):
                files.find_files(each.patterns, key=key)


def divide(raw_keys: Mapping[str, Any]) -> tuple[dict[str, Any], Ours]:
    """Splits the keys that MaxText has read into MaxText's and ours.

    MaxText sees grain, but not its elastic iterator, colocated Python, tiers or a ramp,
    because its checks and machinery for these do not apply to ours.

    Raises:
      ConfigError: if a different pipeline, or elastic training without hosts, is
        requested, or the number of shards is not set.
    """
    theirs = dict(raw_keys)
    ours = {"grain_record_format": "tf_example"}
    ours |= {key: theirs.pop(key) for key in OWN_KEYS if key in theirs}
    if theirs.get("tokenizer_type") == "bytes":
        ours["tokenizer_type"] = theirs.pop("tokenizer_type")
    dataset_type = theirs.get("dataset_type")
    # MaxText's own default is synthetic.
    if dataset_type not in (None, "grain", "synthetic"):
        _refuse(
            f"dataset_type={dataset_type}",
            "omit it, and set grain_train_files and grain_file_type",
        )
    if theirs.get("elastic_enabled") and not theirs.get("enable_single_controller"):
        _refuse(
            "elastic_enabled=true without hosts",
            "set hosts and slices to the numbers of hosts and slices to start here, or,"
            " under Pathways, where MaxText itself handles lost slices, set"
            " enable_single_controller=true",
        )
    if not ours.get("num_logical_shards"):
        raise errors.ConfigError(
            f"{_PLACE}: num_logical_shards is not set; choose it once for the whole"
            " run, as a multiple of every host count that you may use;"
            " `elastic-ckpt plan --hosts 2,4,8 --batches 64,128` suggests a value"
        )
    for key in (
        "colocated_python_data_input",
        "enable_multi_tier_checkpointing",
        "enable_rampup_batch_size",
    ):
        ours[key] = theirs.get(key, False)
        theirs[key] = False
    theirs |= {
        "dataset_type": "grain",
        "grain_use_elastic_iterator": False,
        # Makes MaxText ask our manager at each step whether to save.
        "enable_continuous_checkpointing": True,
    }
    return theirs, ours


def data_keys(
    config: Any, ours: Ours, *, evaluation: bool = False
) -> data_section.DataKeys:
    """The data keys of a MaxText configuration, for training or evaluation.

    Args:
      config: an object with MaxText's keys as attributes.
      ours: the keys that `divide` removed.
      evaluation: whether to return the keys for the evaluation data.

    Raises:
      ConfigError: if a key is unsupported; the message includes the key.
    """
    values = {key: getattr(config, key) for key in DATA_KEYS if key not in ours}
    values |= {key: ours[key] for key in _HIDDEN_DATA_KEYS if key in ours}
    if evaluation:
        values["train_data_columns"] = config.eval_data_columns
        values["tokenize_train_data"] = config.tokenize_eval_data
    if values["tokenizer_type"] == "bytes" or not values["tokenize_train_data"]:
        values["tokenizer_path"] = ""
    section = _from_values(values).data
    # MaxText builds its model and step for one sequence length and batch size.
    for begin, stage in data_section.stages(section):
        for key, value in vars(section).items():
            if vars(stage)[key] != value and key not in _OF_STAGES:
                _refuse(
                    f"{key} in the stage of data_stages that begins at step {begin}",
                    "MaxText uses one value for the whole run; in a stage, set only"
                    f" {' or '.join(_OF_STAGES)}",
                )
    return section


def tiers(config: Any, ours: Ours) -> schema.Config:
    """The checkpoint tiers and metrics of a MaxText configuration.

    Args:
      config: an object with MaxText's keys as attributes.
      ours: the keys that `divide` removed.

    Raises:
      ConfigError: if a value is invalid; the message includes the key.
    """
    key = "enable_multi_tier_checkpointing"
    values = {key: getattr(config, key) for key in TIER_KEYS}
    values |= {key: ours[key] for key in (*_OWN_TIER_KEYS, key) if key in ours}
    return _from_values(values)


def check_vocabulary(config: Any, vocab_size: int) -> None:
    """Raises a ConfigError unless the model has a row for each of `vocab_size` tokens.

    JAX would use the last row for larger token IDs.
    """
    if config.vocab_size < vocab_size:
        _refuse(
            f"vocab_size={config.vocab_size} with a tokenizer of {vocab_size} tokens",
            f"set vocab_size to {vocab_size} or more",
        )


def supervised(given: Mapping[str, Any]) -> schema.Config:
    """The supervisor's configuration, from the keys that a user has set.

    Returns:
      The hosts and slices to start here; `hosts` is 1 if there are none to start.

    Raises:
      ConfigError: if a value is invalid or a key is missing; the message includes the
        key.
    """
    config = _from_values({key: given[key] for key in _OF_SUPERVISOR if key in given})
    hosts = config.world.hosts
    if hosts == 1:
        return config
    for key in ("run_name", "base_output_directory", "per_device_batch_size"):
        if not given.get(key):
            raise errors.ConfigError(f"{_PLACE}: hosts={hosts} requires {key}; set it")
    if given.get("gradient_accumulation_steps", 1) != 1:
        _refuse(
            f"gradient_accumulation_steps with hosts={hosts}",
            "omit it; while slices are missing, gradients are accumulated"
            " automatically, and per_device_batch_size applies to all slices together",
        )
    if config.data.enable_rampup_batch_size and config.elastic.elastic_enabled:
        _refuse(
            f"enable_rampup_batch_size with elastic_enabled and hosts={hosts}",
            "during the ramp, fewer slices would get smaller batches; set one of these"
            " keys to false",
        )
    rows = config.data.per_device_batch_size * hosts * config.world.devices_per_host
    # The ramp is MaxText's own.
    data = dataclasses.replace(
        config.data, global_batch_size=int(rows), enable_rampup_batch_size=False
    )
    return dataclasses.replace(config, data=data)


def _from_values(values: Mapping[str, Any]) -> schema.Config:
    # MaxText has string enumerations for some choices; and where we have a default, it
    # has None, which its files also write as a string.
    plain = {
        key: str(getattr(value, "value", value)) if isinstance(value, str) else value
        for key, value in values.items()
        if str(value).lower() != "none"
    }
    return load.from_values(plain, place=_PLACE)


def _refuse(what: str, remedy: str) -> None:
    raise errors.ConfigError(f"{_PLACE}: {what} is not supported; {remedy}")
