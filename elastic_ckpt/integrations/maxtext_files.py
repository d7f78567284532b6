"""The location in which MaxText looks for data whose files are not set.

MaxText 0.2.5 takes Parquet files of a dataset on the Hugging Face hub (`hf_path`), or
those that `hf_train_files` and `hf_eval_files` name, if `hf_path` is a format; or
TFRecord files in the directory layout of TensorFlow Datasets (`dataset_path`,
`dataset_name`, `train_split`). An error about missing files names this location as the
value to set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilesKey:
    """A key that lists files, and those from which MaxText derives them instead.

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


TRAIN = FilesKey(
    key="grain_train_files",
    hub_split="train",
    hub_split_key=None,
    hub_files_key="hf_train_files",
    name_key="dataset_name",
    split_key="train_split",
)
EVAL = FilesKey(
    key="grain_eval_files",
    hub_split="validation",
    hub_split_key="hf_eval_split",
    hub_files_key="hf_eval_files",
    name_key="eval_dataset_name",
    split_key="eval_split",
)
# Every key of MaxText that is read here.
KEYS = (
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
KINDS = {"hf": "parquet", "tfds": "tfrecord"}


def location(files: FilesKey, kind: str, settings: Mapping[str, Any]) -> str | None:
    """The glob pattern of the files that MaxText would read.

    Args:
      files: the key that is not set.
      kind: MaxText's `grain_file_type`.
      settings: MaxText's keys, at least `KEYS` as far as they are set.

    Returns:
      None if the keys name no location.
    """
    if kind == "parquet" and settings.get("hf_path"):
        given = settings.get(files.hub_files_key)
        if isinstance(given, str) and given.endswith(".parquet"):
            return given
        if given or settings["hf_path"] in _FORMATS:
            return None
        path = str(settings["hf_path"]).strip().strip("/").removeprefix("hf://")
        split = settings.get(files.hub_split_key or "") or files.hub_split
        return f"hf://datasets/{path.removeprefix('datasets/')}/**/*{split}*.parquet"
    directory = settings.get("dataset_path")
    name, split = settings.get(files.name_key), settings.get(files.split_key)
    if kind == "tfrecord" and directory and name and split:
        dataset = str(name).strip("/").replace(":", "/")
        return f"{str(directory).rstrip('/')}/{dataset}/*-{split}.tfrecord-*"
    return None
