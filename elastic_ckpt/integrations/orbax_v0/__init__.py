"""Elastic data and verified model state under Orbax v0's `CheckpointManager`.

ORBAX_V0.md in the directory above shows its use. There are two pairs of arguments:

    TreeSave, TreeRestore          a pytree, with digests of all values
    StatefulSave, StatefulRestore  a `StatefulCheckpointable`: the iterator of
                                   `ec.batches`, a component of `ec.components`

The manager keeps its work: when to save, which steps to keep, the commit. The handlers
do the rest as `ec.Checkpointer` does it without RAM tiers, and write the same format.
Trees are not given to Orbax's own writer, for three reasons: it writes no digest of a
value; to make them, the state would have to be fetched from the devices twice; and its
reader could not compare them when it reads other boxes under another sharding.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.integrations.orbax_v0.stateful_handler import (
        StatefulHandler,
        StatefulRestore,
        StatefulSave,
    )
    from elastic_ckpt.integrations.orbax_v0.tree_handler import (
        TreeHandler,
        TreeRestore,
        TreeSave,
    )

__all__ = [
    "StatefulHandler",
    "StatefulRestore",
    "StatefulSave",
    "TreeHandler",
    "TreeRestore",
    "TreeSave",
]
