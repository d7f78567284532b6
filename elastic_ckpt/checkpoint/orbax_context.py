"""Orbax's `Context` for our verbs.

`pytree.loading.partial_load` is applied. An option that would change what is saved,
loaded or deleted is refused by name if it is set; others tune Orbax's I/O and have no
effect here. Steps that Orbax alone saved are loaded by Orbax, under the same context.
"""

from __future__ import annotations

import contextvars
import operator

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors

_REFUSED = (
    "array.loading.enable_padding_and_truncation",
    "array.loading.raise_array_data_missing_error",
    "array.saving.scoped_storage_options_creator",
    "array.saving.storage_options",
    "array.saving.use_compression",
    "array.saving.use_ocdbt",
    "array.saving.use_zarr3",
    "asynchronous.post_finalization_callback",
    "atomicity",
    "checkpoint_layout",
    "deletion",
    "file.path_class",
    "file.path_permission_mode",
    "multiprocessing.active_processes",
    "multiprocessing.primary_host",
    "pytree.saving",
)


def active() -> ocp.Context | None:
    """The context whose `with` block this is; None outside of all."""
    values = contextvars.copy_context().values()
    return next((each for each in values if isinstance(each, ocp.Context)), None)


def checked(own: ocp.Context | None) -> ocp.Context:
    """The context of a call, to be entered in the thread that does the work.

    Args:
      own: of the checkpointer; an active one takes precedence, as in Orbax.

    Raises:
      CheckpointError: if it has an option that has no meaning here.
    """
    context, default = ocp.Context(active() or own), ocp.Context()
    for name in _REFUSED:
        value = operator.attrgetter(name)(context)
        if value != operator.attrgetter(name)(default):
            raise errors.CheckpointError(
                f"ocp.Context has {name}={value!r}, which this checkpointer does not"
                " apply; leave it at its default, or use Orbax's own Checkpointer"
            )
    return context
