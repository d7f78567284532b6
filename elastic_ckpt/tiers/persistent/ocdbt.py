"""OCDBT: arrays in key-value stores, one per host, and a merged store.

Each host writes zarr v3 arrays to its own store, a directory. The merged store is only
an index that refers to the values in the hosts' stores. Orbax checkpoints have the same
layout.

Spec: https://google.github.io/tensorstore/kvstore/ocdbt/index.html
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from elastic_ckpt.core import boxes, digest, storage
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers import stored_part

_PREFIX = "ocdbt.process_"
# The store file that refers to the store's index, and the file's temporary name.
MANIFEST = "manifest.ocdbt"
NEW_MANIFEST = f"{MANIFEST}.__lock"
# An array's metadata file.
METADATA = "zarr.json"
# Caches index nodes: without it, each value needs one node read per level.
_CACHE_BYTES = 100 * 2**20
# TensorStore encodes larger chunks in its own threads. Opening an array takes ten times
# as long as writing a kilobyte, so small chunks are encoded here.
_SMALL_BYTES = 2**17


def key(leaf: Leaf, box: boxes.Box) -> str:
    """The key of an array's chunk."""
    return array_prefix(leaf.name) + layout.chunk_key(box, leaf.chunk)


def array_prefix(name: str) -> str:
    """The key prefix of the array `name`, as TensorStore normalizes it."""
    return f"{name}/" if name and not name.endswith("/") else name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A leaf's chunk and its values.

    Attributes:
      box: the chunk's box; for an array without elements, the whole box (only its
        metadata is written).
      values: the box's values, in the leaf's dtype.
    """

    leaf: Leaf
    box: boxes.Box
    values: np.ndarray


def store_name(host_id: str, save: str) -> str:
    """The name of a host's store for one save, in a checkpointable's directory.

    Orbax uses process indices here. But a later world that repeats an upload may assign
    the same index to a different host, and a replaced launch may still write to its
    store. So the name contains a hash of the save and the host. Orbax accepts only
    letters and digits.
    """
    return f"{_PREFIX}{digest.name_hash(f'{save}/{host_id}'):016x}"


def new_context() -> ts.Context:
    """Returns a context for stores that are merged or read repeatedly."""
    return ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": _CACHE_BYTES}})


def open_store(directory: epath.PathLike, context: ts.Context) -> ts.KvStore:
    """Opens the store in `directory`, without reading or writing yet."""
    return ts.KvStore.open(store_spec(directory), context=context).result()


def metadata_file(leaf: Leaf) -> bytes:
    """An array's `zarr.json`, as TensorStore writes it."""
    zeros = {"bool": False, "int": 0, "complex": [0.0, 0.0], "float": 0.0}
    order = {} if np.dtype(leaf.dtype).itemsize == 1 else {"endian": "little"}
    as_bytes = {"name": "bytes", **({"configuration": order} if order else {})}
    return storage.canonical_json(
        {
            **layout.array_metadata(leaf),
            "codecs": [as_bytes, {"name": "crc32c"}],
            "fill_value": next(zeros[kind] for kind in zeros if kind in leaf.dtype),
            "node_type": "array",
            "zarr_format": 3,
        }
    )


def write(
    directory: epath.PathLike, chunks: Sequence[Chunk], context: ts.Context
) -> None:
    """Writes chunks and the metadata of their arrays, durably, in one commit.

    A commit takes as long for one chunk as for thousands, so pass many small chunks in
    one call. Until the call returns, TensorStore has a copy of the values.

    Args:
      directory: the store's directory.
      chunks: chunks of any arrays; their values must not change during the call.
      context: a context from `new_context`, the same in all calls for a store.

    Raises:
      ValueError: if storage fails (raised by TensorStore).
    """
    transaction = ts.Transaction(atomic=False)
    store = open_store(directory, context).with_transaction(transaction)
    for leaf in {each.leaf.path: each.leaf for each in chunks}.values():
        store.write(array_prefix(leaf.name) + METADATA, metadata_file(leaf))
    for each in chunks:
        if 0 < each.values.nbytes <= _SMALL_BYTES:
            content = stored_part.content(each.leaf, each.values)
            store.write(key(each.leaf, each.box), content)
        elif each.values.nbytes:
            _write_large(store_spec(directory), each, context, transaction)
    storage.before("write", directory)
    transaction.commit_async().result()


def _write_large(
    spec: dict[str, Any], chunk: Chunk, context: ts.Context, transaction: ts.Transaction
) -> None:
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {**spec, "path": array_prefix(chunk.leaf.name)},
            "metadata": layout.array_metadata(chunk.leaf),
            # Also stores chunks of zeros: a missing chunk means a loss.
            "store_data_equal_to_fill_value": True,
        },
        open=True,
        assume_metadata=True,
        context=context,
        transaction=transaction,
    ).result()
    array[tuple(map(slice, chunk.box.start, chunk.box.stop))].write(
        chunk.values, can_reference_source_data_indefinitely=True
    ).copy.result()


def merge(directory: epath.Path, stores: Iterable[str]) -> None:
    """Merges stores in `directory` into one, atomically.

    Args:
      directory: a checkpointable's directory.
      stores: the names of the subdirectories to merge. The merged store refers to their
        files, so they must stay.
    """
    # Only stores with the same context can refer to each other's values.
    context = new_context()
    transaction = ts.Transaction(atomic=True)
    merged = open_store(directory, context).with_transaction(transaction)
    copies = [
        open_store(directory / name, context).experimental_copy_range_to(merged)
        for name in sorted(stores)
    ]
    for copy in copies:
        copy.result()
    storage.before("write", directory)
    transaction.commit_async().result()


def store_spec(directory: epath.PathLike) -> dict[str, Any]:
    """TensorStore's spec of the store in `directory`, in a `new_context`."""
    base: Any = base_spec(directory)
    spec = {"driver": "ocdbt", "cache_pool": "cache_pool#ocdbt", "base": base}
    if not storage.is_local(directory):
        return spec
    # Value files have unique names, and only the manifest, which is replaced
    # atomically, refers to them. So they are written in place, without renames.
    in_place = {**base, "file_io_locking": {"mode": "non_atomic"}}
    return {**spec, "base": in_place, "manifest": base}


def base_spec(directory: epath.PathLike) -> str | dict[str, str]:
    """TensorStore's spec of the files in `directory`, local or in a bucket.

    Raises:
      ConfigError: if TensorStore cannot have the path.
    """
    storage.check_tensorstore(directory)
    url = os.fspath(directory)
    if storage.is_local(url):
        return {"driver": "file", "path": os.path.abspath(url) + "/"}
    # TensorStore looks for `s3://` buckets at Amazon: it ignores the environment
    # variables by which other clients find other S3-compatible stores.
    given = os.environ.get
    endpoint = given("AWS_ENDPOINT_URL_S3") or given("AWS_ENDPOINT_URL")
    if not (url.startswith("s3://") and endpoint):
        return url + "/"
    bucket, _, path = url.removeprefix("s3://").partition("/")
    region = given("AWS_REGION") or given("AWS_DEFAULT_REGION") or "us-east-1"
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": path + "/",
        "endpoint": endpoint,
        "aws_region": region,
    }
