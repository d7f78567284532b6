"""Trees whose nodes are neither dicts nor lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Persistent


class Model(nnx.Module):
    """Its `nnx.List` has the keys of items and of attributes."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in range(12)])


@jax.tree_util.register_pytree_with_keys_class
class Unhashable:
    """A node whose key has no hash."""

    def __init__(self, tree):
        self._tree = tree

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(["a"]), self._tree)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.fixture(params=["storage", "ram and storage"])
def checkpointer(request, tmp_path):
    tiers = [Persistent(tmp_path / "steps", every=1)]
    if request.param != "storage":
        tiers.append(Local(tmp_path / "ram"))
    with frontend.Checkpointer(tiers) as checkpointer:
        yield checkpointer


def test_an_nnx_module_with_a_list_is_restored(checkpointer):
    model = Model(0)
    assert checkpointer.save(1, model)
    restored = checkpointer.load(1, Model(1))
    assert isinstance(restored, Model)
    leaves = zip(jax.tree.leaves(restored), jax.tree.leaves(model), strict=True)
    assert all(np.array_equal(*pair) for pair in leaves)
    layer = checkpointer.load(1)["layers"]["11"]
    np.testing.assert_array_equal(
        layer["kernel"]["value"], model.layers[11].kernel[...]
    )
    metadata = checkpointer.metadata(1).metadata
    assert metadata["layers"]["11"]["kernel"]["value"].shape == (2, 3)


def test_a_structure_that_cannot_be_saved_raises_from_the_save(checkpointer):
    tree = {"w": Unhashable({"a": jnp.ones(2)})}
    message = r"the structure of 'state' cannot be saved .*give a tree of"
    with pytest.raises(errors.CheckpointError, match=message):
        checkpointer.save_async(1, tree)
    assert checkpointer.save(1, {"w": jnp.ones(2)})
