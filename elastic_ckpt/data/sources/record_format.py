"""Decodes the bytes of an ArrayRecord or TFRecord record: raw bytes, or a tf.Example.

The message type is defined here as in TensorFlow's `example.proto`, so that reading it
requires only protobuf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import source

BYTES = "bytes"
TF_EXAMPLE = "tf_example"
FORMATS = (BYTES, TF_EXAMPLE)

# The column of a raw record.
RAW_COLUMN = "text"

_PACKAGE = "elastic_ckpt.tensorflow"
# The lists of values: name, field number in `Feature`, and protobuf type of the values.
_LISTS = (("bytes_list", 1, 12), ("float_list", 2, 2), ("int64_list", 3, 3))

Decode = Callable[[bytes], source.Element]


def check(record_format: str, *, source_name: str) -> None:
    """Raises a ConfigError unless `record_format` is one of `FORMATS`."""
    if record_format not in FORMATS:
        raise errors.ConfigError(
            f"{source_name}: record_format={record_format!r}; choose one of"
            f" {', '.join(FORMATS)}"
        )


def decoder(record_format: str, columns: tuple[str, ...]) -> Decode:
    """A function that converts a record to an element.

    Args:
      record_format: with `bytes`, elements have one column of bytes, named by `columns`
        or `text`; with `tf_example` they have the features by name: bytes for one
        value, a list of bytes for several, float32 or int64 arrays of shape `[values]`.
      columns: the features to keep; empty keeps all.
    """
    if record_format == BYTES:
        name = columns[0] if columns else RAW_COLUMN
        return lambda record: {name: record}
    return functools.partial(_parse, columns=frozenset(columns))


def decoded(decode: Decode, record: bytes, place: str) -> source.Read:
    """The element of a record, or an error with `place` if it is of another format.

    Raises:
      DataError: if it lacks a feature; names `place`.
    """
    try:
        return decode(record)
    except ValueError as error:
        return source.corrupt(place, error)
    except LookupError as error:
        raise errors.DataError(
            f"{place}: {error}; set columns, which is train_data_columns in a"
            " configuration"
        ) from None


def encode(features: source.Element) -> bytes:
    """A tf.Example of text, bytes, lists of bytes, and arrays of numbers."""
    example = _example_class()()
    for name, value in features.items():
        feature = example.features.feature[name]
        if isinstance(value, str | bytes):
            value = [value]
        if isinstance(value, list):
            values = [v.encode() if isinstance(v, str) else v for v in value]
            feature.bytes_list.value.extend(values)
        elif np.issubdtype(np.asarray(value).dtype, np.floating):
            feature.float_list.value.extend(np.ravel(value).tolist())
        else:
            feature.int64_list.value.extend(np.ravel(value).tolist())
    return example.SerializeToString(deterministic=True)


def _parse(record: bytes, *, columns: frozenset[str]) -> source.Element:
    try:
        features = _example_class().FromString(record).features.feature
    except message.DecodeError as error:
        raise ValueError(f"not a tf.Example: {error}") from None
    missing = columns - features.keys()
    if missing:
        raise LookupError(
            f"no feature {sorted(missing)}, the record has {sorted(features)}"
        )
    return {n: _value(f) for n, f in features.items() if not columns or n in columns}


def _value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        values = list(feature.bytes_list.value)
        return values[0] if len(values) == 1 else values
    if kind == "float_list":
        return np.array(feature.float_list.value, np.float32)
    return np.array(feature.int64_list.value, np.int64)


@functools.cache
def _example_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="elastic_ckpt/example.proto", package=_PACKAGE, syntax="proto3"
    )
    feature = descriptor_pb2.DescriptorProto(name="Feature")
    feature.oneof_decl.add(name="kind")
    for name, number, type_number in _LISTS:
        kind = name.title().replace("_", "")
        file.message_type.add(name=kind).field.add(
            name="value", number=1, label=3, type=type_number
        )
        feature.field.add(
            name=name, number=number, label=1, type=11, oneof_index=0,
            type_name=f".{_PACKAGE}.{kind}",
        )  # fmt: skip
    file.message_type.append(feature)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(
        name="value", number=2, label=1, type=11, type_name=f".{_PACKAGE}.Feature"
    )
    features.field.add(
        name="feature", number=1, label=3, type=11,
        type_name=f".{_PACKAGE}.Features.FeatureEntry",
    )  # fmt: skip
    file.message_type.add(name="Example").field.add(
        name="features", number=1, label=1, type=11, type_name=f".{_PACKAGE}.Features"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    name = f"{_PACKAGE}.Example"
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
