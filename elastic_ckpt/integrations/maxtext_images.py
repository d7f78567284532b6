"""Rows of text and images, as MaxText makes them of records.

MaxText's `vision_sft_preprocessing_pipeline` is a list of functions, which it gives one
by one to the `map` of a dataset: those before `batch` are for a record, and those after
it for a batch of a host. `_recorded` has MaxText call it on a dataset that only notes
them. `ImageRows` then applies all of them to a record, the latter to a batch of this
record alone; so a row does not depend on the rows beside it.

Most models want the images of a batch as rows of their own. Then a record must have one
image: of the images of a batch, MaxText's step takes as many as there are rows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import data_keys, elastic_data
from elastic_ckpt.data.lm import pipeline, tokenizers
from elastic_ckpt.integrations import maxtext_config, maxtext_seam

# What rows may have beside their text.
FEATURES = frozenset({"images", "image_masks"})

# What MaxText's function also asks of a configuration, whatever the run's is: records
# are columns, and there is no batch.
_FIXED: dict[str, Any] = {
    "elastic_enabled": False,
    "expansion_factor_real_data": -1,
    "global_batch_size_to_load": 1,
    "grain_file_type": "parquet",
    "grain_use_elastic_iterator": False,
    "hf_access_token": None,
    "use_tunix_gradient_accumulation": False,
}
_MAX_SHOWN = 60

_Map = Callable[[dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Makes a row of a record with texts and images; a `language.RowMaker`.

    A row has the features of text, `[L]`, with `inputs_position` `[L, 3]` if the model
    has three positions; `images`, `[N, ...]` in models that take several images of a
    row, and otherwise `[...]`; and `image_masks`, if the model has them.

    Attributes:
      keys: MaxText's, with their values: JSON text of `maxtext_config.image_keys`.
    """

    keys: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of the prompt, of the response, and of the images."""
        return (*self._texts, *self._images)

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        return json.loads(self.keys)

    @property
    def _texts(self) -> tuple[str, ...]:
        return tuple(self._values[maxtext_config.TEXT_COLUMNS])

    @property
    def _images(self) -> tuple[str, ...]:
        of_images = self._values[maxtext_config.IMAGE_COLUMN]
        return (of_images,) if isinstance(of_images, str) else tuple(of_images)

    def __getstate__(self) -> dict[str, Any]:
        return {"keys": self.keys}

    def identity(self) -> dict[str, storage.Json]:
        """MaxText's keys, but with the tokenizer's content in place of its path."""
        values = dict(self._values)
        kind, path = values["tokenizer_type"], values.pop("tokenizer_path")
        return {**values, "tokenizer": tokenizers.load(kind, path).identity()}

    def row(self, element: dict[str, Any]) -> dict[str, Any]:
        """The row of a record, by MaxText's functions.

        Raises:
          DataError: if a column has no text or no image, or MaxText refuses the record;
            names the beginning of its prompt.
        """
        record: dict[str, Any] = {
            column: _text(column, element[column]) for column in self._texts
        } | {column: _image(column, element[column]) for column in self._images}
        prompt = record[self._texts[0]]
        try:
            return _made(self.keys, record)
        except Exception as error:  # whatever MaxText and Pillow raise
            raise errors.DataError(
                f"MaxText makes no row of the record whose {self._texts[0]} begins"
                f" {prompt[:_MAX_SHOWN]!r}: {error}; correct the record, or the keys of"
                " images"
            ) from error


def from_config(
    config: Any, data: data_keys.DataKeys, *, evaluation: bool = False
) -> ImageRows:
    """The rows of a MaxText configuration with images.

    Args:
      config: has MaxText's keys as attributes.
      data: of its training, or of its evaluation.
      evaluation: whether it is the latter.

    Raises:
      ConfigError: if MaxText has not what is taken of it, or the keys do not fit.
    """
    maxtext_seam.IMAGE_PIPELINE.check()
    rows = ImageRows(
        keys=maxtext_config.image_keys(config, data, evaluation=evaluation)
    )
    # Before a run, not at its first record.
    _transforms(rows.keys)
    return rows


def of_run(
    settings: Mapping[str, Any], data: data_keys.DataKeys
) -> elastic_data.ElasticData | None:
    """The data of a recorded run that trained on images; None if it did not.

    Args:
      settings: of the run's directory, by key.
      data: of its training.

    Raises:
      ConfigError: if MaxText is not installed here, or not as it was.
    """
    keys = json.loads(settings.get("maxtext") or "{}").get(maxtext_config.ROW_KEYS)
    if keys is None:
        return None
    maxtext_seam.check_installed()
    maxtext_seam.IMAGE_PIPELINE.check()
    return pipeline.from_rows(data, ImageRows(keys=json.dumps(keys)))


def _text(column: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list | tuple) and value:
        return [_text(column, each) for each in value]
    if not isinstance(value, str):
        raise errors.DataError(
            f"column {column!r} has a {type(value).__name__}, not text; name the"
            " columns of the prompt and of the response (train_data_columns)"
        )
    return value


def _image(column: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and value:
        return [_image(column, each) for each in value]
    of_it = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(of_it, bytes):
        raise errors.DataError(
            f"column {column!r} has a {type(of_it).__name__}, not the bytes of an image"
            " file; a path would not be a part of the data: write the images themselves"
            " into the files (train_image_column names the column)"
        )
    return of_it


def _made(keys: str, record: dict[str, Any]) -> dict[str, np.ndarray]:
    of_record, of_batch = _transforms(keys)
    for transform in of_record:
        record = transform(record)
    batch = {name: np.asarray(value)[None] for name, value in record.items()}
    for transform in of_batch:
        batch = transform(batch)
    num_images = len(batch["images"])
    if num_images > 1:
        raise ValueError(
            f"it has {num_images} images, and MaxText's step would give"
            f" {json.loads(keys)['model_name']} those of other rows; write one image"
            " into each record, or train a model of Gemma, which takes several"
        )
    return {name: value[0] for name, value in batch.items()}


@functools.lru_cache(maxsize=8)
def _transforms(keys: str) -> tuple[list[_Map], list[_Map]]:
    # MaxText's functions of a record, and those of a batch.
    values = json.loads(keys)
    noted = _Noted()
    maxtext_seam.IMAGE_PIPELINE.look_up()(
        noted,
        _Keys({**_FIXED, **values}),
        values[maxtext_config.TEXT_COLUMNS],
        values[maxtext_config.IMAGE_COLUMN],
    )
    if not noted.makes_batches:
        maxtext_seam.refuse(f"makes no batch in {maxtext_seam.IMAGE_PIPELINE.name}")
    return noted.of_record, noted.of_batch


class _Noted:
    """Takes the place of a Grain dataset, and notes what is to be done with it."""

    def __init__(self) -> None:
        self.of_record: list[_Map] = []
        self.of_batch: list[_Map] = []
        self.makes_batches = False

    def map(self, transform: Any) -> _Noted:
        """As of a dataset: a function, or one of Grain's transforms."""
        if isinstance(transform, grain.transforms.Map):
            transform = transform.map
        (self.of_batch if self.makes_batches else self.of_record).append(transform)
        return self

    def batch(self, batch_size: int, *, drop_remainder: bool) -> _Noted:
        """From now on, transforms are those of a batch."""
        del batch_size, drop_remainder
        self.makes_batches = True
        return self

    def mp_prefetch(self, options: Any) -> _Noted:
        """Worker processes are ours."""
        del options
        return self


class _Keys:
    """A configuration with the keys that determine rows, and no other."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        # Not an AttributeError, for which MaxText has a default.
        raise errors.ConfigError(
            f"MaxText's pipeline of images reads its key {name}, which elastic_ckpt"
            " does not know to change rows"
        )
