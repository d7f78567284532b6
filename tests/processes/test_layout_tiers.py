"""Real hosts load a step through a layout from RAM, peers and storage."""

import functools
import pathlib
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.universal.rules.layout import Layout
from tests import spoilt_files
from tests.processes import tier_worlds
from tests.processes.test_memory import on, read_bytes, reasons, saved

STEP = 4
LAYOUT = Layout.parse("""
version: 1
rules:
  - from: {"w": "x y"}
    to: {"matrix": "y x"}
  - from: {"m": "a b c"}
    to: {"m": "b (c a)"}
  - from: {"b": "dim"}
    to: {"vectors/b": "1 dim"}
drop: ["scale"]
""")
NUM_BYTES = 4 * (48 * 40 + 240 + 24 * 10 * 4)


def wanted(mesh, step):
    """The values of a step transposed, and how they are wanted on a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(None, ("slice", "fsdp")))
    values = functools.partial(tier_worlds.values, step=step)
    expected = {
        "matrix": values("w").T,
        "m": values("m").transpose(1, 2, 0).reshape(10, 96),
        "vectors": {"b": values("b")[None]},
    }
    return expected, jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        expected,
    )


def load(checkpointer, mesh, *, expected_step=STEP):
    """Loads the newest step transposed, beside its data, and compares each bit."""
    expected, abstract = wanted(mesh, expected_step)
    data = tier_worlds.Counter()
    loaded = checkpointer.load_checkpointables(
        None, {"state": abstract, "data": data}, layout=LAYOUT
    )
    assert (checkpointer.latest.step, data.step) == (expected_step, expected_step)
    for array, whole in zip(
        jax.tree.leaves(loaded["state"]), jax.tree.leaves(expected), strict=True
    ):
        for shard in array.addressable_shards:
            part = np.ascontiguousarray(whole[shard.index])
            assert np.asarray(shard.data).tobytes() == part.tobytes()


def flip_first_box(ram, number, step):
    """Spoils the first box of a matrix in the RAM of a machine."""
    (directory,) = pathlib.Path(ram.directory(number)).glob(f"hosts/0/{step}-*")
    files = (directory / "state/w/c").glob("*/*")
    spoilt_files.change_first_byte(min(each for each in files if each.is_file()))


def restored(events):
    (event,) = (each for each in events if each["event"] == "restored_from")
    return event


@pytest.mark.slow
def test_ram_alone_is_enough_on_any_number_of_hosts(ram, tmp_path):
    steps = tmp_path / "steps"
    options = {"persistent": str(steps), "copies": 1}
    on(ram, range(3), saved([STEP]), tmp_path, **options)
    shutil.rmtree(steps / str(STEP))
    for num_hosts in (3, 1, 4):
        events = on(ram, range(num_hosts), load, tmp_path, **options)
        read = read_bytes(events)
        assert not reasons(events, "step_passed_over")
        assert read["persistent"] == 0
        assert read["local"] >= NUM_BYTES // 3
        # The columns of a matrix lie in the boxes of all hosts.
        assert read["close"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 0])
def test_a_flipped_bit_in_ram_is_replaced_from_a_peer_or_storage(ram, tmp_path, copies):
    options = {"copies": copies}
    if not copies:
        options["persistent"] = str(tmp_path / "steps")
    on(ram, range(2), saved([STEP]), tmp_path, **options)
    # Each host asks its own RAM disk first.
    flip_first_box(ram, 0, STEP)
    event = restored(on(ram, range(2), load, tmp_path, **options))
    assert event["bad_copies"] >= 1
    assert event["repaired"] == 1
    assert (event["persistent_bytes"] > 0) == (not copies)
    event = restored(on(ram, range(2), load, tmp_path, **options))
    assert (event["bad_copies"], event["persistent_bytes"]) == (0, 0)
