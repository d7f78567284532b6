"""The files that a run trains on, written from texts if that is configured."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, storage


def prepare(config: schema.Config) -> schema.Config:
    """Writes training files if that is asked for; names them absolutely."""
    from elastic_ckpt.data import datasets

    data = config.data
    directories = [part for part in data.text_directory.split(";") if part]
    wanted = ["grain_train_files"] + ["grain_eval_files"] * bool(data.eval_interval)
    if data.grain_train_mixture_config_path:
        path = os.path.abspath(data.grain_train_mixture_config_path)
        data = dataclasses.replace(data, grain_train_mixture_config_path=path)
        wanted.remove("grain_train_files")
    for key in wanted:
        of = datasets.from_list(getattr(data, key), key=key)
        for place, dataset in enumerate(of):
            directory = directories.pop(0) if directories else ""
            of[place] = dataclasses.replace(
                dataset,
                patterns=_written(dataset.patterns, directory, data.grain_file_type),
            )
        changed: dict[str, Any] = {key: datasets.to_list(of)}
        data = dataclasses.replace(data, **changed)
    return dataclasses.replace(config, data=data)


def _written(patterns: str, directory: str, file_type: str) -> str:
    # The patterns, absolute; their one file is written if it is not there.
    from elastic_ckpt.data import text
    from elastic_ckpt.data.sources import files

    file = pathlib.Path(patterns)
    is_one_file = not set("*?[,") & set(patterns) and storage.is_local(patterns)
    if directory and is_one_file and not file.exists():
        named = text.file_type(patterns) or file_type
        if named != file_type:
            raise errors.ConfigError(
                f"text_directory is to be written to {patterns}, whose name is that of"
                f" {named}, as grain_file_type={file_type}; set grain_file_type={named}"
                " or another name"
            )
        written = text.write(directory, str(file), file_type=file_type)
        print(f"wrote {file}: {written.num_documents:,} documents", flush=True)
    absolute = files.absolute(patterns)
    files.find_files(absolute)
    return absolute
