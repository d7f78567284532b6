"""Specs of Orbax's checkpoints lead to the saved values, for all handlers."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
import tensorstore as ts
from orbax.checkpoint import v1

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import stored_values


def state():
    params = {
        "dense": {"kernel": jnp.arange(48.0).reshape(8, 6)},
        "a.b": jnp.ones(3, jnp.bfloat16),
        "list": [jnp.zeros(2), np.arange(4)],
    }
    return {"params": params, "opt_state": optax.adam(0.1).init(params), "step": 7}


def names(tree):
    """The leaves by the names that tensors have."""
    return {
        "/".join(
            jax.tree_util.keystr((key,), simple=True).replace("/", "~1") for key in path
        ): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if not isinstance(leaf, str)
    }


save_ocdbt = v0.PyTreeCheckpointer().save
save_zarr = v0.PyTreeCheckpointer(use_ocdbt=False).save


@pytest.mark.parametrize("save", [v1.save, save_ocdbt, save_zarr])
def test_a_pytree_opens_with_the_names_of_its_leaves(tmp_path, save):
    tree = {**state(), "name": "hello"}
    save(tmp_path / "x", tree)
    checkpoint = stored_values.assert_holds(tmp_path / "x", names(tree))
    assert checkpoint.format == "Orbax"
    assert checkpoint.values["name"] == "hello"


def test_of_several_pytrees_names_begin_with_that_of_the_tree(tmp_path):
    # Directories of arrays have no place for the first name.
    parts = {"a": {"a.b/c": jnp.arange(3)}, "b": {"x": jnp.arange(4)}}
    v1.save_checkpointables(tmp_path / "x", parts)
    stored_values.assert_holds(tmp_path / "x", names(parts))
    stored_values.assert_holds(tmp_path / "x" / "b", names(parts["b"]))


def leaf(*keys):
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": "jax.Array"},
    }


@pytest.mark.parametrize(
    ("entry", "change", "match"),
    [
        (leaf("w", "more"), {}, r"w\.more is listed, but is not in the store"),
        (leaf("../../etc"), {}, "arrays outside itself"),
        (leaf("w"), {}, "'w' is listed twice"),
        (leaf(3), {}, "does not list arrays as Orbax does"),
        ([], {}, "does not list arrays as Orbax does"),
        (None, {"shape": [-1]}, "w has the invalid shape"),
        (None, {"shape": [2**40, 2**40]}, "w has shape .* too large"),
        (None, {"shape": "x"}, "w has the invalid shape .'str'."),
        (None, {"dtype": "O"}, "w has the unsupported type 'O'"),
        (None, {"dtype": ["a"]}, "has the unsupported type"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, entry, change, match):
    save_zarr(tmp_path / "x", {"w": jnp.arange(3)})
    metadata, array = tmp_path / "x" / "_METADATA", tmp_path / "x" / "w" / ".zarray"
    fields = json.loads(metadata.read_text())
    fields["tree_metadata"] |= {"e": entry} if entry is not None else {}
    metadata.write_text(json.dumps(fields))
    array.write_text(json.dumps(json.loads(array.read_text()) | change))
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(tmp_path / "x")


def test_a_step_that_is_not_complete_is_refused(tmp_path):
    unlike = {"x.orbax-checkpoint-tmp": "was not committed", "x": "has no pytree"}
    for name, match in unlike.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "_CHECKPOINT_METADATA").write_text("{}")
        with pytest.raises(FormatError, match=match):
            opening.open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_chunk_that_is_missing_is_lost_unless_it_was_not_written(tmp_path, is_sparse):
    save_zarr(tmp_path / "x", {"w": jnp.arange(3)})
    metadata = tmp_path / "x" / "_METADATA"
    fields = json.loads(metadata.read_text())
    fields["store_array_data_equal_to_fill_value"] = not is_sparse
    metadata.write_text(json.dumps(fields))
    (tmp_path / "x" / "w" / "0").unlink()
    if is_sparse:
        stored_values.assert_holds(tmp_path / "x", {"w": np.zeros(3, np.int32)})
    else:
        with pytest.raises(ValueError, match="is missing"):
            stored_values.contents(tmp_path / "x")


def test_arrays_compressed_by_blosc_are_read(tmp_path):
    save_zarr(tmp_path / "x", {"w": np.ones(3)})
    shutil.rmtree(tmp_path / "x" / "w")
    store = {"driver": "file", "path": str(tmp_path / "x" / "w")}
    spec = {"driver": "zarr", "kvstore": store, "create": True}
    spec["metadata"] = {"compressor": {"id": "blosc"}}
    given = {"dtype": ts.float64, "shape": [3], "fill_value": 0}
    ts.open(spec, **given).result()[...] = np.arange(3.0)
    stored_values.assert_holds(tmp_path / "x", {"w": np.arange(3.0)})
