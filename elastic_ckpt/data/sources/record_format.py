"""Decodes the bytes of an ArrayRecord or TFRecord record: raw bytes, or a tf.Example.

The message type is defined here as in TensorFlow's `example.proto`, so that reading it
requires only protobuf.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message,
    message_factory,
    text_format,
)

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data.sources import source

BYTES = "bytes"
TF_EXAMPLE = "tf_example"
FORMATS = (BYTES, TF_EXAMPLE)

# The column of a raw record.
RAW_COLUMN = "text"

_NOT_EXAMPLES = (
    " if the records are plain text, set grain_record_format=bytes (in Python,"
    " record_format='bytes'); otherwise,"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordFiles(source.RawFiles):
    """Base class of sources whose records are bytes; see `TFRecord`."""

    record_format: str = BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.record_format not in FORMATS:
            raise errors.ConfigError(
                f"{type(self).__name__}: record_format={self.record_format!r}; choose"
                f" one of {', '.join(FORMATS)}"
            )

    def settings(self) -> dict[str, storage.Json]:
        """The formats and the columns to read."""
        return {**super().settings(), "record_format": self.record_format}

    def _decoded(self, record: bytes, place: str) -> source.Element:
        """The element of a record.

        Raises:
          CorruptError: if the record has a different format. The message includes
            `place`.
          DataError: if the record lacks a feature. The message includes `place`.
        """
        if self.record_format == BYTES:
            (name,) = self.columns[:1] or (RAW_COLUMN,)
            return {name: record}
        try:
            features = parsed(record)
        except ValueError as error:
            raise source.corrupt(place, error, remedy=_NOT_EXAMPLES) from None
        names = self.columns or tuple(features)
        source.check_columns(place, names, sorted(features), what="feature")
        return {name: _value(features[name]) for name in names}


def parsed(record: bytes) -> dict[str, Any]:
    """The features of a serialized `tf.train.Example` by name.

    Raises:
      ValueError: if the record is not a tf.Example or contains a feature twice.
    """
    try:
        entries = _example_class().FromString(record).features.feature
    except message.DecodeError as error:
        raise ValueError(f"not a tf.Example: {error}") from None
    features = {entry.key: entry.value for entry in entries}
    if len(features) < len(entries):
        names = [entry.key for entry in entries]
        twice = max(names, key=names.count)
        raise ValueError(f"the feature {twice!r} occurs twice")
    return features


def _value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value if kind else ()
    if kind == "bytes_list":
        return values[0] if len(values) == 1 else list(values)
    return np.array(values, np.float32 if kind == "float_list" else np.int64)


@functools.cache
def _example_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto()
    text_format.Parse(_EXAMPLE_PROTO, file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    example = pool.FindMessageTypeByName("elastic_ckpt.tensorflow.Example")
    return message_factory.GetMessageClass(example)


# The file descriptor, as from `protoc`, but with the map of features as a list of
# entries, which shows duplicate names.
_EXAMPLE_PROTO = """
name: "elastic_ckpt/example.proto" package: "elastic_ckpt.tensorflow" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: "Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "FeatureEntry" }
  nested_type { name: "FeatureEntry"
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type_name: "Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 type_name: "Features" } }
"""
