"""The files that a run trains on, written from texts if that is configured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import data_keys

_MIXTURE = "grain_train_mixture_config_path"


def prepare(
    config: schema.Config, *, report: Callable[[str], None] = lambda _: None
) -> schema.Config:
    """The configuration with absolute file names; writes the files that are missing.

    Args:
      config: of the run.
      report: called with a line of text for each file that was written.

    Raises:
      ConfigError: if a file cannot be written in the configured format.
      DataError: if there are no such files, nor texts to write them from.
    """
    from elastic_ckpt.data import datasets
    from elastic_ckpt.data.sources import files

    data = config.data
    directories = [part for part in data.text_directory.split(";") if part]
    keys = ["grain_train_files"] * (not data.grain_train_mixture_config_path)
    keys += ["grain_eval_files"] * bool(data.eval_interval)
    for key in keys:
        for dataset in datasets.from_list(getattr(data, key), key=key):
            directory = directories.pop(0) if directories else ""
            if directory:
                _write(dataset.patterns, directory, data.grain_file_type, report)
            files.find_files(files.absolute(dataset.patterns))
    values = _absolute({key: vars(data)[key] for key in (_MIXTURE, *keys)})
    if data.data_stages:
        # As they are now: the file may change, and another start may be elsewhere.
        stages = []
        for begin, stage in data_keys.stages(data):
            own = {k: v for k, v in vars(stage).items() if v != vars(data)[k]}
            stages.append({"begin_step": begin, **_absolute(own)})
        values["data_stages"] = json.dumps(stages)
    return dataclasses.replace(config, data=dataclasses.replace(data, **values))


def _absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    # The values of keys of data, with absolute file names.
    from elastic_ckpt.data import datasets
    from elastic_ckpt.data.sources import files

    absolute = dict(values)
    for key, value in values.items():
        if value and key == _MIXTURE:
            absolute[key] = os.fspath(storage.absolute(value))
        elif value and key in ("grain_train_files", "grain_eval_files"):
            listed = [
                dataclasses.replace(each, patterns=files.absolute(each.patterns))
                for each in datasets.from_list(value, key=key)
            ]
            absolute[key] = datasets.to_list(listed)
    return absolute


def _write(
    patterns: str, directory: str, file_type: str, report: Callable[[str], None]
) -> None:
    # Nothing to write if the patterns are not one file, or it exists.
    from elastic_ckpt.data.lm import text
    from elastic_ckpt.data.sources import files

    if set("*?[,") & set(patterns) or files.exists(patterns):
        return
    named_type = text.file_type(patterns) or file_type
    if named_type != file_type:
        raise errors.ConfigError(
            f"grain_file_type={file_type}, but text_directory would be written to"
            f" {patterns}, whose name is that of {named_type}; set"
            f" grain_file_type={named_type}, or change the file's name"
        )
    written = text.write(directory, patterns, file_type=file_type)
    report(f"wrote {patterns}: {written.num_documents:,} documents")
