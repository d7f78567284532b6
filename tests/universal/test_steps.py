"""Steps of another layout, which the checkpointer reads through rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.frontend import Checkpointer
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests.checkpoint.test_component_io import Counter

MESH = jax.make_mesh((4,), ("data",))
UNSCANNED = {f"layer_{n}": {"w": np.arange(32.0).reshape(8, 4) + n} for n in range(3)}
SCAN = Layout.parse(
    """
version: 1
rules:
  - from: {"layer_{layer}/w": "in out"}
    to: {"layers/w": "out layer in"}
""",
    file="scan.yml",
)
SHARDED = NamedSharding(MESH, PartitionSpec("data"))
SCANNED = {
    "layers": {"w": jax.ShapeDtypeStruct((4, 3, 8), np.float32, sharding=SHARDED)}
}


@pytest.fixture
def make(tmp_path):
    opened = []

    def make(*, make_checkpointer=Checkpointer, every=1):
        tiers = [Local(tmp_path / "ram"), Persistent(tmp_path / "steps", every=every)]
        opened.append(make_checkpointer(tiers, run="run"))
        return opened[-1]

    yield make
    for checkpointer in opened:
        checkpointer.close()


def saved(checkpointer, **parts):
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), UNSCANNED)
    assert checkpointer.save_checkpointables(3, {"state": state, **parts})
    checkpointer.wait()
    return state


def test_a_step_is_loaded_into_scanned_layers_beside_its_other_parts(make):
    checkpointer = make()
    state = saved(checkpointer, ema={"x": jnp.ones(2)}, counter=Counter(5))
    counter = Counter(0)
    wanted = {"state": SCANNED, "ema": {"x": jnp.zeros(2)}, "counter": counter}
    loaded = checkpointer.load_checkpointables(None, wanted, layout=SCAN)
    assert list(loaded) == list(wanted)
    expected = np.stack([np.asarray(layer["w"]).T for layer in state.values()], axis=1)
    array = loaded["state"]["layers"]["w"]
    assert np.asarray(array).tobytes() == expected.tobytes()
    assert array.sharding == SHARDED
    assert np.asarray(loaded["ema"]["x"]).tolist() == [1, 1]
    assert counter.count == 5
    # Later steps follow the one that was loaded.
    assert checkpointer.save(4, loaded["state"])
    again = checkpointer.load_async(3, SCANNED, layout=SCAN).result()
    assert np.asarray(again["layers"]["w"]).tobytes() == expected.tobytes()


def test_a_layout_has_its_defaults_and_what_it_requires(make):
    checkpointer = make()
    state = saved(checkpointer)
    described = {
        "sizes": {"heads": {"value": "config/heads", "default": 2}},
        "rules": [
            {
                "from": {"layer_{layer}/w": "(heads d) out"},
                "to": {"layers/w": "out layer (d heads)"},
            }
        ],
    }
    tree, layout = {"state": SCANNED}, Layout.from_dict(described)
    loaded = checkpointer.load_checkpointables(3, tree, layout=layout)
    made = [np.asarray(layer["w"]).reshape(2, 4, 4).T for layer in state.values()]
    expected = np.stack([each.reshape(4, 8) for each in made], axis=1)
    assert np.array_equal(loaded["state"]["layers"]["w"], expected)
    required = Layout.from_dict({**described, "require": {"config/kind": ["llama"]}})
    with pytest.raises(LayoutError, match="config/kind in the checkpoint is missing"):
        checkpointer.load_checkpointables(3, tree, layout=required)


def test_an_error_of_a_layout_loads_nothing(make):
    checkpointer = make()
    saved(checkpointer, counter=Counter(5))
    counter = Counter(0)
    other = {"stack": SCANNED["layers"]}
    with pytest.raises(LayoutError, match=r"stack/w .*scan.yml: rules"):
        checkpointer.load_checkpointables(
            3, {"state": other, "counter": counter}, layout=SCAN
        )
    assert counter.count == 0


def loaded_scanned(checkpointer, step=3):
    """Loads the scanned layers, and compares their bits."""
    state = checkpointer.load(step, SCANNED, layout=SCAN)
    expected = np.stack(
        [layer["w"].astype(np.float32).T for layer in UNSCANNED.values()], axis=1
    )
    assert np.asarray(state["layers"]["w"]).tobytes() == expected.tobytes()


def flipped(path):
    """Flips a bit of the first value in a file."""
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def events_of(make, **options):
    listed = []

    def emit(name, **fields):
        listed.append({"event": name, **fields})

    def make_checkpointer(tiers, **more):
        return frontend.Checkpointer(tiers, emit=emit, **more)

    return make(make_checkpointer=make_checkpointer, **options), listed


def last(listed, name):
    return [each for each in listed if each["event"] == name][-1]


def test_a_step_in_ram_alone_is_read_through_a_layout(make):
    checkpointer, listed = events_of(make, every=100)
    saved(checkpointer)
    loaded_scanned(checkpointer)
    restored = last(listed, "restored_from")
    assert restored["local_bytes"] == 3 * 8 * 4 * 4
    assert restored["persistent_bytes"] == 0


def test_a_bad_box_in_ram_is_replaced_from_storage_and_repaired(make, tmp_path):
    checkpointer, listed = events_of(make)
    saved(checkpointer)
    chunk, *_ = sorted((tmp_path / "ram").glob("hosts/0/3-*/state/layer_1/w/c/0/0"))
    flipped(chunk)
    loaded_scanned(checkpointer)
    restored = last(listed, "restored_from")
    assert (restored["bad_copies"], restored["repaired"]) == (1, 1)
    assert restored["persistent_bytes"] == 8 * 4 * 4
    loaded_scanned(checkpointer)
    assert last(listed, "restored_from")["bad_copies"] == 0


def test_a_bad_box_without_a_good_copy_leads_to_the_step_before(make, tmp_path):
    checkpointer, listed = events_of(make, every=3)
    saved(checkpointer)
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), UNSCANNED)
    assert checkpointer.save_checkpointables(4, {"state": state})
    checkpointer.wait()
    chunk, *_ = sorted((tmp_path / "ram").glob("hosts/0/4-*/state/layer_1/w/c/0/0"))
    flipped(chunk)
    with pytest.raises(errors.CheckpointError, match=r"no good copy of state/layer_1"):
        checkpointer.load(4, SCANNED, layout=SCAN)
    loaded_scanned(checkpointer, None)
    assert last(listed, "restored_from")["step"] == 3
    assert checkpointer.latest.step == 3
