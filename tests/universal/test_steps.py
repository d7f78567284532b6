"""Steps of another layout, which the checkpointer reads through rules."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests import spoilt_files
from tests.checkpoint.test_component_io import Counter

MESH = jax.make_mesh((4,), ("data",))
STATE = {
    f"layer_{n}": {"w": np.arange(32, dtype=np.float32).reshape(8, 4) + n}
    for n in range(3)
}
RULE = {
    "from": {"layer_{layer}/w": "(heads d) out"},
    "to": {"layers/w": "out layer (d heads)"},
}
# A step has no values.
SIZES = {"heads": {"value": "config/heads", "default": 2}}
SCAN = Layout.from_dict({"rules": [RULE], "sizes": SIZES}, name="scan.yml")
SHARDED = NamedSharding(MESH, PartitionSpec("data"))
W = jax.ShapeDtypeStruct((4, 3, 8), np.float32, sharding=SHARDED, weak_type=True)
SCANNED = {"layers": {"w": W}}
STACKED = np.stack([layer["w"].T for layer in STATE.values()], axis=1)
EXPECTED = STACKED.reshape(4, 3, 2, 4).swapaxes(2, 3).reshape(4, 3, 8)


@pytest.fixture
def last():
    """The fields of the last event of each name."""
    return {}


@pytest.fixture
def checkpointer(tmp_path, last):
    """Has steps in RAM, and each third in storage."""
    tiers = Local(tmp_path / "ram"), Persistent(tmp_path / "steps", every=3)
    emit = lambda name, **fields: last.update({name: fields})  # noqa: E731
    opened = frontend.Checkpointer(tiers, run="run", emit=emit)
    with contextlib.closing(opened):
        yield opened


def save(checkpointer, step=3, **parts):
    state = jax.tree.map(jnp.asarray, STATE)
    assert checkpointer.save_checkpointables(step, {"state": state, **parts})
    checkpointer.wait()


def load_scanned(checkpointer, step=3, **others):
    """Loads the scanned layers beside other parts, and compares their bits."""
    wanted = {"state": SCANNED, **others}
    loaded = checkpointer.load_checkpointables(step, wanted, layout=SCAN)
    assert list(loaded) == list(wanted)
    array = loaded["state"]["layers"]["w"]
    assert np.asarray(array).tobytes() == EXPECTED.tobytes()
    assert array.sharding == SHARDED
    assert array.weak_type
    return loaded


def flip(tmp_path, step):
    """Spoils the only chunk of a leaf in RAM."""
    (chunk,) = (tmp_path / "ram").glob(f"hosts/0/{step}-*/state/layer_1/w/c/0/0")
    spoilt_files.change_first_byte(chunk)


def test_a_step_is_loaded_into_scanned_layers_beside_its_other_parts(checkpointer):
    save(checkpointer, ema={"x": jnp.ones(2)}, counter=Counter(5))
    counter = Counter(0)
    loaded = load_scanned(checkpointer, None, ema={"x": jnp.zeros(2)}, counter=counter)
    assert np.asarray(loaded["ema"]["x"]).tolist() == [1, 1]
    assert counter.count == 5
    # Later steps follow the one that was loaded.
    assert checkpointer.save(4, loaded["state"])
    load_scanned(checkpointer)


def test_an_error_of_a_layout_loads_nothing(checkpointer):
    save(checkpointer, counter=Counter(5))
    wanted = {"state": {"stack": SCANNED["layers"]}, "counter": Counter(0)}
    require = {"config/kind": "llama"}
    layout = Layout.from_dict({"rules": [RULE], "sizes": SIZES, "require": require})
    for each, match in ((SCAN, "stack/w"), (layout, "config/kind in the checkpoint")):
        with pytest.raises(LayoutError, match=match):
            checkpointer.load_checkpointables(3, wanted, layout=each)
    assert wanted["counter"].count == 0


def test_a_step_of_orbax_alone_is_read_through_a_layout(checkpointer, tmp_path):
    state = jax.tree.map(jnp.asarray, STATE)
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        orbax.save_checkpointables(3, {"state": state, "ema": {"x": jnp.ones(2)}})
    loaded = load_scanned(checkpointer, ema={"x": jnp.zeros(2)})
    assert np.asarray(loaded["ema"]["x"]).tolist() == [1, 1]


def test_a_bad_box_in_ram_is_replaced_from_storage_and_repaired(
    checkpointer, last, tmp_path
):
    save(checkpointer)
    flip(tmp_path, 3)
    load_scanned(checkpointer)
    restored = last["restored_from"]
    assert (restored["bad_copies"], restored["repaired"]) == (1, 1)
    assert restored["persistent_bytes"] == 8 * 4 * 4
    load_scanned(checkpointer)
    assert last["restored_from"]["bad_copies"] == 0


def test_a_bad_box_without_a_good_copy_leads_to_the_step_before(
    checkpointer, last, tmp_path
):
    save(checkpointer)
    save(checkpointer, 4)
    # The step is in RAM alone.
    load_scanned(checkpointer, 4)
    assert last["restored_from"]["local_bytes"] == EXPECTED.nbytes
    assert last["restored_from"]["persistent_bytes"] == 0
    flip(tmp_path, 4)
    with pytest.raises(errors.CheckpointError, match=r"no good copy of state/layer_1"):
        checkpointer.load(4, SCANNED, layout=SCAN)
    load_scanned(checkpointer, None)
    assert last["restored_from"]["step"] == checkpointer.latest.step == 3
