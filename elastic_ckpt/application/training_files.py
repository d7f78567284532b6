"""The files that a run trains on, written from texts if that is configured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import data_keys


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
    keys = ["grain_train_files"] + ["grain_eval_files"] * bool(data.eval_interval)
    if data.grain_train_mixture_config_path:
        path = storage.absolute(data.grain_train_mixture_config_path)
        data = dataclasses.replace(
            data, grain_train_mixture_config_path=os.fspath(path)
        )
        keys.remove("grain_train_files")
    for key in keys:
        with_files = []
        for dataset in datasets.from_list(getattr(data, key), key=key):
            directory = directories.pop(0) if directories else ""
            if directory:
                _write(dataset.patterns, directory, data.grain_file_type, report)
            patterns = files.absolute(dataset.patterns)
            files.find_files(patterns)
            with_files.append(dataclasses.replace(dataset, patterns=patterns))
        changed: dict[str, Any] = {key: datasets.to_list(with_files)}
        data = dataclasses.replace(data, **changed)
    if data.data_stages:
        # As they are now: the file may change, and another start may be elsewhere.
        data = dataclasses.replace(data, data_stages=_stages(data))
    return dataclasses.replace(config, data=data)


def _stages(data: data_keys.DataKeys) -> str:
    # The stages as JSON, with absolute file names.
    from elastic_ckpt.data import datasets
    from elastic_ckpt.data.sources import files

    found = []
    for begin, stage in data_keys.stages(data):
        own = {
            key: value for key, value in vars(stage).items() if value != vars(data)[key]
        }
        mixture, train = "grain_train_mixture_config_path", "grain_train_files"
        if own.get(mixture):
            own[mixture] = os.fspath(storage.absolute(own[mixture]))
        if own.get(train):
            own[train] = datasets.to_list(
                [
                    dataclasses.replace(each, patterns=files.absolute(each.patterns))
                    for each in datasets.from_list(own[train], key=train)
                ]
            )
        found.append({"begin_step": begin, **own})
    return json.dumps(found)


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
