"""Orbax's `Context` for our verbs: what it sets is applied, or refused by name.

`pytree.loading.partial_load` is applied. Options that only tune Orbax's I/O are taken
and have no effect, as ours has its own bounds. Any other option that is not at its
default would change what is saved or loaded, so it is refused. Steps that Orbax alone
saved are loaded by Orbax, under the same context.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors

_TUNING = (
    "array.saving.ocdbt_target_data_file_size",
    "array.saving.enable_pinned_host_transfer",
    "array.saving.enable_post_merge_validation",
    "array.saving.use_replica_parallel",
    "array.saving.min_slice_bytes_for_replica_parallel",
    "array.saving.max_replicas_for_replica_parallel",
    "array.saving.enable_replica_parallel_separate_folder",
    "asynchronous.timeout_secs",
    "asynchronous.create_directories_asynchronously",
    "multiprocessing.barrier_sync_key_prefix",
    "file.skip_sync_file_validations",
    "array.loading.use_load_and_broadcast",
    "array.loading.load_and_broadcast_options",
)
_SAVING = (
    "pytree.saving",
    "array.saving",
    "asynchronous",
    "multiprocessing",
    "file",
    "checkpointables",
    "atomicity",
    "checkpoint_layout",
)
_LOADING = ("array.loading", "checkpoint_layout")
_DELETION = ("deletion",)


def active() -> ocp.Context | None:
    """The context whose `with` block this is; None outside of all."""
    values = contextvars.copy_context().values()
    return next((each for each in values if isinstance(each, ocp.Context)), None)


def of_save(own: ocp.Context | None) -> None:
    """Raises a CheckpointError if the context has an option that a save would ignore.

    Args:
      own: of the checkpointer; an active one counts before it, as in Orbax.
    """
    _check(active() or own, _SAVING)


def of_deletion(own: ocp.Context | None) -> None:
    """Raises a CheckpointError if the context has deleted files go elsewhere."""
    _check(active() or own, _DELETION)


def of_load(own: ocp.Context | None) -> ocp.Context:
    """The context of a load, to be entered in the thread that loads.

    Args:
      own: of the checkpointer; an active one counts before it, as in Orbax.

    Raises:
      CheckpointError: if it has an option that the load would ignore.
    """
    context = active() or own
    _check(context, _LOADING)
    return ocp.Context(context)


def _check(context: ocp.Context | None, groups: tuple[str, ...]) -> None:
    if context is None:
        return
    default = dict(_options("", ocp.Context(), groups))
    for name, value in _options("", context, groups):
        if not name.startswith(_TUNING) and not _is_same(value, default.get(name)):
            raise errors.CheckpointError(
                f"ocp.Context has {name}={value!r}, which this checkpointer does not"
                " apply; leave it at its default, or use Orbax's own Checkpointer"
            )


def _options(prefix: str, options: Any, groups: tuple[str, ...]) -> Iterator[Any]:
    # The options below some groups, by their names.
    names = [group.partition(".") for group in groups]
    for first, _, rest in names:
        value, name = getattr(options, first), f"{prefix}{first}"
        if rest:
            yield from _options(f"{name}.", value, (rest,))
        elif dataclasses.is_dataclass(value):
            fields = tuple(field.name for field in dataclasses.fields(value))
            yield from _options(f"{name}.", value, fields)
        else:
            yield name, value


def _is_same(value: Any, default: Any) -> bool:
    if hasattr(value, "get_all_entries"):
        return value.get_all_entries() == default.get_all_entries()
    if isinstance(default, type(ocp.Context().array.saving.array_metadata_store)):
        # Each context has its own.
        return type(value) is type(default)
    return value == default
