"""From MaxText's configuration to ours: pure functions, free of MaxText and JAX.

MaxText refuses unknown keys, and combinations that its own elastic iterator does not
support. So `divide` takes our keys out of its configuration before it is checked, and
`train_section` and `eval_section` convert its keys, with ours, to our sections.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import data_keys, datasets
from elastic_ckpt.data.sources import files
from elastic_ckpt.training import load, schema


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FilesKey:
    """A key that lists files, and those from which MaxText derives them instead.

    MaxText 0.2.5 takes Parquet files of a dataset on the Hugging Face hub (`hf_path`),
    or those that `hf_train_files` and `hf_eval_files` name, if `hf_path` is a format;
    or TFRecord files in the directory layout of TensorFlow Datasets (`dataset_path`,
    `dataset_name`, `train_split`). An error about missing files names this location as
    the value to set.

    Attributes:
      key: lists files.
      hub_split: the split of a dataset on the hub, if no key names it.
      hub_split_key: names that split, if any key does.
      hub_files_key: lists files, if `hf_path` names a format.
      name_key: the dataset in the layout of TensorFlow Datasets.
      split_key: its split.
    """

    key: str
    hub_split: str
    hub_split_key: str | None
    hub_files_key: str
    name_key: str
    split_key: str


_TRAIN_FILES = _FilesKey(
    key="grain_train_files",
    hub_split="train",
    hub_split_key=None,
    hub_files_key="hf_train_files",
    name_key="dataset_name",
    split_key="train_split",
)
_EVAL_FILES = _FilesKey(
    key="grain_eval_files",
    hub_split="validation",
    hub_split_key="hf_eval_split",
    hub_files_key="hf_eval_files",
    name_key="eval_dataset_name",
    split_key="eval_split",
)
# Every key from which they are derived.
_FILES_KEYS = (
    "dataset_name",
    "dataset_path",
    "eval_dataset_name",
    "eval_split",
    "hf_eval_files",
    "hf_eval_split",
    "hf_path",
    "hf_train_files",
    "train_split",
)
# Formats of files that `hf_path` may name in place of a dataset.
_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "text", "webdataset", "xml")
# The type of file that each of MaxText's other pipelines reads.
_KINDS = {"hf": "parquet", "tfds": "tfrecord"}

# Keys of MaxText's tiers of checkpoints, which mean the same here.
TIER_KEYS = (
    "enable_multi_tier_checkpointing",
    "local_checkpoint_directory",
    "local_checkpoint_period",
    "multi_tier_checkpointing_backup_interval_minutes",
    "multi_tier_checkpointing_backup_interval_steps",
)
# Keys of ours that MaxText does not have: of its data, and of its tiers.
OWN_DATA_KEYS = (
    "num_logical_shards",
    "data_stages",
    "grain_record_format",
    "chat_template_date",
    "drop_remainder",
    "corrupt_records",
    "tokenizer_threads",
    "data_read_ahead_batches",
    "data_read_ahead_mib",
)
OWN_TIER_KEYS = (
    *(
        field.name
        for field in dataclasses.fields(schema.TiersSection)
        if field.name not in TIER_KEYS
    ),
    # A step is validated before it is saved to them.
    "replica_validation",
    "replica_validation_tolerance",
    "replica_validation_action",
    # The loss after a restore from them.
    "distrust_steps",
)
# Keys of MaxText's elastic training, which mean the same here.
ELASTIC_KEYS = (
    "elastic_enabled",
    "elastic_max_retries",
    "elastic_min_slice_count",
    "elastic_timeout_seconds",
)
# Keys of ours for hosts that this program starts.
OWN_WORLD_KEYS = (
    "hosts",
    "slices",
    "devices_per_host",
    *(
        field.name
        for field in dataclasses.fields(schema.ElasticSection)
        if field.name not in ELASTIC_KEYS
    ),
    # In which the hosts save, and leave.
    "termination_grace_period_seconds",
)
# Keys of ours for the metrics of each host; TensorBoard is MaxText's own.
OWN_METRICS_KEYS = ("prometheus_port", "prometheus_interface")
OWN_KEYS = (*OWN_DATA_KEYS, *OWN_TIER_KEYS, *OWN_WORLD_KEYS, *OWN_METRICS_KEYS)
# Keys of MaxText that mean the same here.
SHARED_KEYS = (
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
    "train_data_columns",
    "use_sft",
    "use_truncation",
)
# Keys of MaxText with which a run begins with other weights.
WEIGHT_KEYS = (
    "load_full_state_path",
    "load_parameters_path",
    "source_checkpoint_layout",
)
# And those that are read in another way.
READ_KEYS = (
    "async_checkpointing",
    "base_output_directory",
    "checkpoint_dir",
    "checkpoint_period",
    "enable_checkpointing",
    "enable_continuous_checkpointing",
    "enable_single_controller",
    "eval_data_columns",
    "eval_per_device_batch_size",
    "global_batch_size_to_load",
    "global_batch_size_to_load_eval",
    "max_num_checkpoints_to_keep",
    "num_slices",
    "per_device_batch_size",
    "run_name",
    "save_checkpoint_on_completion",
    "steps",
    "tokenize_eval_data",
    "tokenizer_path",
    "tokenizer_type",
    "vocab_size",
    *_FILES_KEYS,
)

PLACE = "MaxText's configuration"
# A line of MaxText's own file.
_BASE = re.compile(r"(^|/)base\.yml, line \d+$")
_DATASET = "dataset_type"
_SYNTHETIC = "synthetic"
_TOKENIZER = "tokenizer_type"
_BYTES = "bytes"
_IN_SIDECAR = "colocated_python_data_input"
_TIERS = "enable_multi_tier_checkpointing"


# Keys that follow from others, so that a value of a user's has no effect.
_FOLLOWING = {
    f"{name}{suffix}": f"{prefix}per_device_batch_size"
    for suffix, prefix in (("", ""), ("_eval", "eval_"))
    for name in ("global_batch_size", "global_batch_size_to_load")
} | {
    "global_batch_size_to_train_on": "per_device_batch_size",
    "global_batch_size_to_eval_on": "eval_per_device_batch_size",
}
_SAME_END = "set it to false, for here all hosts end at the same batch"
# Keys of which other values than `_ACCEPTED` are refused, with the remedy.
_REMEDIES = {
    "formatting_func_path": "apply the function when you write the files",
    "expansion_factor_real_data": "leave it at -1, for here any number of hosts reads"
    " any checkpoint",
    "generate_padding_batch_train": _SAME_END,
    "generate_padding_batch_eval": _SAME_END,
    "enable_emergency_checkpoint": "set it to false, for such checkpoints have no data"
    " state, and enable_multi_tier_checkpointing to true",
    "use_dpo": "MaxText's trainer of preferences saves no state of its data; train on"
    " pairs of responses in your own loop",
    "use_multimodal": "set it to false and train on the text alone, or on images in"
    " your own loop, with ec.data.lm.packed_multimodal",
}
_ACCEPTED = dict.fromkeys(_REMEDIES, False) | {
    "expansion_factor_real_data": -1,
    "formatting_func_path": "",
}

# Every key of MaxText that is looked at.
MAXTEXT_KEYS = (
    *SHARED_KEYS,
    *READ_KEYS,
    *TIER_KEYS,
    *ELASTIC_KEYS,
    *_REMEDIES,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    """The settings that are hidden from MaxText.

    Attributes:
      values: our keys, and what they are set to.
      in_sidecar: whether the iterator runs in colocated Python.
      uses_tiers: whether checkpoints are kept in our tiers.
    """

    values: Mapping[str, Any]
    in_sidecar: bool = False
    uses_tiers: bool = False


def explicit_keys(arguments: Sequence[str]) -> set[str]:
    """The keys that a user has set: in MaxText's arguments, or in a file of theirs.

    MaxText's own base.yml sets every key, and its other files some.

    Args:
      arguments: of MaxText; a YAML file may be first.

    Raises:
      ConfigError: if the file cannot be read, or is no YAML.
    """
    path, overrides = _divided(arguments)
    # MaxText takes `a.b=1` for a part of its key `a`.
    keys = {each.partition("=")[0].split(".")[0] for each in overrides}
    bases = _bases()
    for key, place in load.origins(path, bases=bases).items():
        if not _BASE.search(place) and not place.startswith(bases):
            keys.add(key)
    return keys


def settings_of(
    wanted: Collection[str], arguments: Sequence[str]
) -> tuple[schema.Config, dict[str, object]]:
    """What MaxText's arguments set some keys to; see `load.of_keys`."""
    path, overrides = _divided(arguments)
    return load.of_keys(wanted, path, overrides, bases=_bases())


def given(arguments: Sequence[str]) -> list[str]:
    """Each key that is set, also in files, as an argument: equal on all machines."""
    path, overrides = _divided(arguments)
    values = load.given(path, overrides, bases=_bases())
    return [f"{key}={values[key]!r}" for key in sorted(values)]


def _divided(arguments: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    # The YAML file, if one is named, and the rest.
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return None, arguments


def _bases() -> tuple[str, ...]:
    # The directories of MaxText's own files, which a file may have for its base.
    package = importlib.util.find_spec("maxtext")
    places = package.submodule_search_locations if package else None
    return tuple(
        os.path.join(os.path.realpath(place), "configs") for place in places or ()
    )


def check_files(data: data_keys.DataKeys) -> None:
    """Raises a DataError if local files are not there, before MaxText is imported."""
    for key in ("grain_train_files", "grain_eval_files"):
        for each in datasets.from_list(getattr(data, key), key=key):
            if each.patterns and storage.is_local(each.patterns):
                files.find_files(each.patterns, key=key)


def check_weights(given: Mapping[str, object]) -> None:
    """Checks that weights are in the format in which MaxText is to read them.

    Args:
      given: the keys that a user has set, with their values.

    Raises:
      ConfigError: if a directory has weights of Hugging Face.
    """
    if given.get("source_checkpoint_layout", "orbax") != "orbax":
        return
    for key in ("load_parameters_path", "load_full_state_path"):
        path = str(given.get(key) or "")
        if not path or not storage.is_local(path):
            continue
        if any(storage.absolute(path).glob("*.safetensors")):
            raise errors.ConfigError(
                f"{PLACE}: {key}={path}: these are Hugging Face weights; run"
                f" `elastic-ckpt convert {path} OUTPUT/0 --rules LAYOUT` first, and set"
                " load_parameters_path to the absolute path of OUTPUT/0/items"
            )


def check_known(given: Iterable[str], known: Collection[str]) -> None:
    """Checks that keys are of MaxText or ours.

    Args:
      given: the keys that a user has set.
      known: those of MaxText.

    Raises:
      ConfigError: names the first that is not, and the nearest of both; or one that
        follows from others.
    """
    for key in given:
        if key in _FOLLOWING:
            raise errors.ConfigError(
                f"{PLACE}: {key} has no effect: a global batch is {_FOLLOWING[key]}"
                " times the number of devices; set that"
            )
        if key not in known and key not in OWN_KEYS:
            near = difflib.get_close_matches(key, [*known, *OWN_KEYS], n=1, cutoff=0.0)
            raise errors.ConfigError(
                f"{PLACE}: unknown key {key!r}, of neither MaxText nor elastic_ckpt;"
                f" did you mean {near[0]!r}?"
            )


def divide(
    raw_keys: Mapping[str, Any],
    *,
    known: Collection[str] | None = None,
    explicit: Collection[str] = (),
) -> tuple[dict[str, Any], Own]:
    """Divides the keys that MaxText has read into MaxText's and ours.

    MaxText sees grain, and neither its elastic iterator nor colocated Python nor tiers:
    for these it has checks that do not hold for ours.

    Args:
      raw_keys: with their values.
      known: the keys that MaxText has; None if it checks them itself.
      explicit: see `explicit_keys`.

    Raises:
      ConfigError: if another pipeline is asked for, the shards are not chosen, or a key
        is of neither program.
    """
    if known is not None:
        check_known([key for key in raw_keys if key not in _FOLLOWING], known)
    theirs = dict(raw_keys)
    values = {"grain_record_format": "tf_example"}
    values |= {key: theirs.pop(key) for key in OWN_KEYS if key in theirs}
    if theirs.get(_TOKENIZER) == _BYTES:
        values[_TOKENIZER] = theirs.pop(_TOKENIZER)
    dataset_type = theirs.get(_DATASET, _SYNTHETIC)
    if dataset_type == _SYNTHETIC and _DATASET in explicit:
        raise errors.ConfigError(
            f"{PLACE}: {_DATASET}={_SYNTHETIC} is data that MaxText generates, which"
            " has no state to save; leave the key out to train on"
            f" {_TRAIN_FILES.key}, or run MaxText itself"
        )
    # It is the default in MaxText's base.yml.
    if dataset_type not in ("grain", _SYNTHETIC):
        files_key = _TRAIN_FILES
        kind = _KINDS.get(str(dataset_type))
        location = kind and _location(files_key, kind, theirs)
        remedy = (
            f"grain, grain_file_type to {kind}, and {files_key.key} to {location}"
            if location
            else f"grain, and {files_key.key} to ArrayRecord, Parquet or TFRecord files"
        )
        raise errors.ConfigError(
            f"{PLACE}: {_DATASET}={dataset_type} can only be read by MaxText itself;"
            f" set it to {remedy}"
        )
    if theirs.get("elastic_enabled") and not theirs.get("enable_single_controller"):
        raise errors.ConfigError(
            f"{PLACE}: elastic_enabled=true without hosts: set hosts and slices to"
            " what this program is to start here, or enable_single_controller=true"
            " under Pathways, where MaxText itself handles lost slices"
        )
    in_sidecar = theirs.get(_IN_SIDECAR, False)
    uses_tiers = bool(theirs.get(_TIERS, False))
    theirs |= {
        _DATASET: "grain",
        "grain_use_elastic_iterator": False,
        _IN_SIDECAR: False,
    }
    if uses_tiers:
        # MaxText would wait for GKE's replicator on TPUs; ours need none. And it asks
        # our manager at each step whether to save.
        theirs |= {_TIERS: False, "enable_continuous_checkpointing": True}
    for key in OWN_WORLD_KEYS:
        values.pop(key, None)
    checked = _section({**values, _IN_SIDECAR: in_sidecar})
    if not checked.num_logical_shards:
        raise errors.ConfigError(
            f"{PLACE}: num_logical_shards is not set; choose it once for the life of"
            " the run, a multiple of each number of hosts that you may use:"
            " `elastic-ckpt plan --hosts 2,4,8 --batches 64,128` suggests one"
        )
    return theirs, Own(
        values=values,
        in_sidecar=checked.colocated_python_data_input,
        uses_tiers=uses_tiers,
    )


def train_section(config: Any, own: Own) -> data_keys.DataKeys:
    """The training data of a MaxText configuration.

    Args:
      config: has MaxText's keys as attributes.
      own: what was taken out of it.

    Raises:
      ConfigError: naming the key that has no meaning here, and the way out.
    """
    for key, remedy in _REMEDIES.items():
        value = getattr(config, key)
        if value != _ACCEPTED[key]:
            raise errors.ConfigError(f"{PLACE}: {key}={value}: {remedy}")
    directory = config.base_output_directory
    if directory and storage.is_local(directory) and not os.path.isabs(directory):
        raise errors.ConfigError(
            f"{PLACE}: base_output_directory={directory}: MaxText saves to an absolute"
            f" path or a bucket; give {os.path.abspath(directory)}"
        )
    _check_files_are_named(config)
    kind = own.values.get(_TOKENIZER) or _text(config.tokenizer_type)
    values = {key: getattr(config, key) for key in SHARED_KEYS}
    values |= {
        **{key: own.values[key] for key in own.values if key in OWN_DATA_KEYS},
        _TOKENIZER: kind,
        "tokenizer_path": _tokenizer_path(config, kind),
        _IN_SIDECAR: own.in_sidecar,
    }
    section = _absolute(_section(values))
    _check_stages(section)
    return section


def _check_stages(section: data_keys.DataKeys) -> None:
    # MaxText makes its model and its step for one length and one size of batch.
    for begin, stage in data_keys.stages(section):
        changed = [
            key
            for key, value in vars(section).items()
            if vars(stage)[key] != value and key not in _OF_STAGES
        ]
        if changed:
            raise errors.ConfigError(
                f"{PLACE}: data_stages: the stage that begins at step {begin} sets"
                f" {', '.join(changed)}, and MaxText has one value of it for a run;"
                f" set only {' or '.join(_OF_STAGES)} there"
            )


_OF_STAGES = ("grain_train_files", "grain_train_mixture_config_path")


def eval_section(config: Any, own: Own) -> data_keys.DataKeys:
    """The evaluation data of a MaxText configuration; see `train_section`."""
    of_eval = _section(
        {
            "train_data_columns": config.eval_data_columns,
            "use_sft": config.use_sft,
            "tokenize_train_data": config.tokenize_eval_data,
        }
    )
    return dataclasses.replace(
        train_section(config, own),
        train_data_columns=of_eval.train_data_columns,
        tokenize_train_data=of_eval.tokenize_train_data,
    )


def tiers_config(config: Any, own: Own) -> schema.Config:
    """The tiers of checkpoints, and the metrics, that a MaxText configuration asks for.

    Args:
      config: has MaxText's keys as attributes.
      own: what was taken out of it.

    Raises:
      ConfigError: naming the key whose value has no meaning.
    """
    values = {key: getattr(config, key) for key in TIER_KEYS}
    values[_TIERS] = own.uses_tiers
    of_ours = {*OWN_TIER_KEYS, *OWN_METRICS_KEYS}
    values |= {key: value for key, value in own.values.items() if key in of_ours}
    # MaxText has None where we have 0: that key of the two does not count.
    values = {key: value for key, value in values.items() if value is not None}
    values |= {
        "checkpoint_period": config.checkpoint_period,
        "max_num_checkpoints_to_keep": config.max_num_checkpoints_to_keep or 0,
        "run_name": config.run_name,
    }
    return load.from_values(values, place=PLACE)


def run_config(
    config: Any, own: Own, *, data: data_keys.DataKeys, started: schema.Config
) -> schema.Config:
    """What a run of MaxText keeps of its configuration, for verbs that read the run.

    Args:
      config: has MaxText's keys as attributes.
      own: what was taken out of it.
      data: of its training.
      started: the hosts and slices that the program was started with.
    """
    tiers = tiers_config(config, own)
    return dataclasses.replace(
        started,
        run=dataclasses.replace(
            started.run,
            run_name=config.run_name,
            base_output_directory=config.base_output_directory,
            steps=config.steps,
        ),
        data=data,
        metrics=tiers.metrics,
        tiers=tiers.tiers,
        checkpoint=dataclasses.replace(
            tiers.checkpoint,
            enable_checkpointing=config.enable_checkpointing,
            checkpoint_period=config.checkpoint_period,
            save_checkpoint_on_completion=config.save_checkpoint_on_completion,
        ),
    )


def global_batch_size(
    config: Any, *, num_devices: int, evaluation: bool = False
) -> int:
    """Rows of a global batch that MaxText's step takes.

    Raises:
      ConfigError: if they do not divide over the devices, or MaxText would load more of
        them than it trains on.
    """
    prefix, suffix = ("eval_", "_eval") if evaluation else ("", "")
    rows_per_device = getattr(config, f"{prefix}per_device_batch_size")
    if rows_per_device < 1:
        raise errors.ConfigError(
            f"{PLACE}: {prefix}per_device_batch_size={rows_per_device} makes MaxText"
            " load a row for every device and drop some of them, and which ones"
            " depends on the number of devices; set it to a whole number"
        )
    rows = getattr(config, f"global_batch_size_to_load{suffix}")
    if rows % num_devices:
        raise errors.ConfigError(
            f"{PLACE}: {prefix}per_device_batch_size={rows_per_device} makes a global"
            f" batch of {rows} rows, which cannot be divided evenly among {num_devices}"
            " devices; set it to a whole number"
        )
    return rows


def check_vocabulary(config: Any, vocab_size: int) -> None:
    """Raises a ConfigError unless the model has a row for each of `vocab_size` tokens.

    JAX would take the last row for those that are too large.
    """
    if config.vocab_size < vocab_size:
        raise errors.ConfigError(
            f"{PLACE}: vocab_size={config.vocab_size}, but the tokenizer has"
            f" {vocab_size} tokens; set vocab_size to {vocab_size} or more"
        )


def _section(values: Mapping[str, Any]) -> data_keys.DataKeys:
    columns = values.get("train_data_columns")
    if isinstance(columns, list) and len(columns) > 1 and not values.get("use_sft"):
        raise errors.ConfigError(
            f"{PLACE}: train_data_columns={columns}: text is in one column; name it, or"
            " run MaxText itself"
        )
    plain = {key: _text(value) for key, value in values.items()}
    return load.from_values(plain, place=PLACE).data


def _text(value: Any) -> Any:
    # MaxText uses enumerations of texts for some choices.
    return str(getattr(value, "value", value)) if isinstance(value, str) else value


def _check_files_are_named(config: Any) -> None:
    # MaxText derives file names that are not set from other keys, which this refuses:
    # a change of them would be one of the run's data.
    wanted = [_TRAIN_FILES]
    if config.grain_train_mixture_config_path:
        wanted.clear()
    if config.eval_interval > 0:
        wanted.append(_EVAL_FILES)
    for files_key in wanted:
        if getattr(config, files_key.key):
            continue
        settings = {key: getattr(config, key) for key in _FILES_KEYS}
        location = _location(files_key, config.grain_file_type, settings)
        raise errors.ConfigError(
            f"{PLACE}: {files_key.key} is empty; set it to "
            + (f"{location}, where MaxText would look" if location else "the files")
        )


def _location(
    files_key: _FilesKey, kind: str, settings: Mapping[str, Any]
) -> str | None:
    """The glob pattern of the files that MaxText would read.

    Args:
      files_key: the key that is not set.
      kind: MaxText's `grain_file_type`.
      settings: MaxText's keys, at least `_FILES_KEYS` as far as they are set.

    Returns:
      None if the keys name no location.
    """
    if kind == "parquet" and settings.get("hf_path"):
        given = settings.get(files_key.hub_files_key)
        if isinstance(given, str) and given.endswith(".parquet"):
            return given
        if given or settings["hf_path"] in _FORMATS:
            return None
        path = str(settings["hf_path"]).strip().strip("/").removeprefix("hf://")
        split = settings.get(files_key.hub_split_key or "") or files_key.hub_split
        return f"hf://datasets/{path.removeprefix('datasets/')}/**/*{split}*.parquet"
    directory = settings.get("dataset_path")
    name, split = settings.get(files_key.name_key), settings.get(files_key.split_key)
    if kind == "tfrecord" and directory and name and split:
        dataset = str(name).strip("/").replace(":", "/")
        return f"{str(directory).rstrip('/')}/{dataset}/*-{split}.tfrecord-*"
    return None


def _tokenizer_path(config: Any, kind: str) -> str:
    of_eval = config.eval_interval > 0 and config.tokenize_eval_data
    if kind == _BYTES or not (config.tokenize_train_data or of_eval):
        return ""
    path = config.tokenizer_path or ""
    local = storage.is_local(path)
    if kind == "huggingface" and local and not os.path.exists(os.path.expanduser(path)):
        raise errors.ConfigError(
            f"{PLACE}: tokenizer_path={path} is not on this machine; download the"
            " tokenizer and set tokenizer_path to its tokenizer.json or the directory"
            " that has it"
        )
    return path


def _absolute(data: data_keys.DataKeys) -> data_keys.DataKeys:
    # The iterator may run in another working directory.
    changed: dict[str, Any] = {}
    for key in ("grain_train_files", "grain_eval_files"):
        if getattr(data, key):
            changed[key] = datasets.to_list(
                [
                    dataclasses.replace(each, patterns=files.absolute(each.patterns))
                    for each in datasets.from_list(getattr(data, key), key=key)
                ]
            )
    if data.grain_train_mixture_config_path:
        mixture = os.fspath(storage.absolute(data.grain_train_mixture_config_path))
        changed["grain_train_mixture_config_path"] = mixture
    if data.chat_template_path:
        template = os.fspath(storage.absolute(data.chat_template_path))
        changed["chat_template_path"] = template
    return dataclasses.replace(data, **changed)
