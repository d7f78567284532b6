"""A checkpointer over tiers, on one host: its verbs, what it restores, how it ends."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.core import checked_blobs, errors
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.tiers.persistent import persistent_root
from tests import ctrl_c, seams
from tests.checkpoint.test_component_io import Counter, Failing
from tests.recorded_events import RecordedEvents

SPEC = PartitionSpec("a", "b")
KEPT = {"keep": ocp.training.preservation_policies.PreserveAll()}
STATE = {"w": np.ones(2)}


def state(step, spec=SPEC):
    values = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    over = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), spec)
    low = jnp.full(5, step, jnp.bfloat16)
    return {"w": jax.device_put(values, over), "b": low, "n": step}


def bits(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), tree)


def save(checkpointer, step, **options):
    checkpointables = {"state": state(step), "data": Counter(10 * step)}
    return checkpointer.save_checkpointables(step, checkpointables, **options)


def check(checkpointer, step, asked=None):
    """A step, the newest one unless another is asked for, is as it was saved."""
    checkpointables = {"state": state(0), "data": Counter()}
    restored = checkpointer.load_checkpointables(asked, checkpointables)
    assert bits(restored["state"]) == bits(state(step))
    assert restored["data"].count == 10 * step


def stored(tmp_path):
    return persistent_root.PersistentRoot.from_path(tmp_path / "steps").steps()


def steps_of(checkpointer):
    return [each.step for each in checkpointer.checkpoints]


def test_minutes_go_on_from_the_backup_of_the_world_before(make, tmp_path):
    # Worlds may be shorter than the time between two backups.
    hourly, late = Persistent(tmp_path / "steps", every_minutes=60), seams.Clock()
    for step, minutes in ((1, 0), (2, 30), (3, 61)):
        late.time_ns = lambda minutes=minutes: time.time_ns() + minutes * 60 * 10**9
        with seams.by(late), make(hourly, every=None) as world:
            world.save(step, {"n": step}, force=step == 1)
        assert stored(tmp_path) == ([1, 3] if step == 3 else [1])


CUSTOM = {"note": "x", "numbers": [1, 2.5, None]}


def noted(checkpoint):
    return checkpoint.step, checkpoint.metrics, checkpoint.custom_metadata


def test_steps_that_orbax_alone_saved_are_found_and_told_as_unverified(make, tmp_path):
    recorded = RecordedEvents()
    checkpointer = make(local=KEPT, emit=recorded)
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        for step in (3, 7):
            options = {"metrics": {"loss": step}, "custom_metadata": CUSTOM}
            stock.save(step, {"n": step}, **options)
        committed = [stock.metadata(step).commit_timestamp_nsecs for step in (3, 7)]
    # Somebody else's step is found by looking again.
    assert checkpointer.latest is None
    checkpointer.reload()
    expected = [(3, {"loss": 3}, CUSTOM), (7, {"loss": 7}, CUSTOM)]
    assert list(map(noted, checkpointer.checkpoints)) == expected
    times = [each.commit_timestamp_nsecs for each in checkpointer.checkpoints]
    assert times == committed
    assert noted(checkpointer.latest) == noted(checkpointer.metadata()) == expected[1]
    assert checkpointer.save(8, {"n": 8})
    checkpointer.wait()
    assert [each.step for each in checkpointer.checkpoints if each.path] == [3, 7, 8]
    assert checkpointer.load(3, roll_back=True) == {"n": 3}
    assert checkpointer.save(4, {"n": 4})
    checkpointer.wait()
    # Steps of Orbax are abandoned, too.
    assert stored(tmp_path) == steps_of(checkpointer) == [3, 4]
    event, *_ = recorded.named("degraded")
    assert event["why"] == "stock Orbax saved it, so its values cannot be verified"


def test_restored_values_stay_when_files_are_used_again(make, tmp_path):
    def files():
        found = tmp_path.glob("ram/hosts/*/**/*")
        return {each.stat().st_ino for each in found if each.stat().st_size > 2**18}

    def saved(step):
        return {"jax": jnp.full(2**18, step), "numpy": np.full(2**18, step)}

    checkpointer = make(every=None)
    assert checkpointer.save(1, saved(1))
    of_first = files()
    restored = checkpointer.load(1, saved(0))
    for step in (2, 3, 4):
        assert checkpointer.save(step, saved(step))
        checkpointer.wait()
    assert steps_of(checkpointer) == [4]
    assert of_first & files()
    assert bits(restored) == bits(saved(1))
    # A step can update the restored arrays in place.
    address = restored["jax"].unsafe_buffer_pointer()
    updated = jax.jit(lambda array: array + 1, donate_argnums=0)(restored["jax"])
    assert updated.unsafe_buffer_pointer() == address


def test_a_start_searches_once_for_the_step_that_it_loads(make, monkeypatch):
    with make() as checkpointer:
        save(checkpointer, 1)
    survey, searches = HostReader.survey, []

    @functools.wraps(survey)
    def counted(reader):
        searches.append(reader)
        return survey(reader)

    monkeypatch.setattr(HostReader, "survey", counted)
    with make() as checkpointer:
        assert checkpointer.checkpointables_metadata().step == 1
        check(checkpointer, 1)
        assert len(searches) == 1
        save(checkpointer, 2)
        check(checkpointer, 2)
    with make() as checkpointer:
        save(checkpointer, 3)
        check(checkpointer, 3)
    with make() as checkpointer:
        checkpointer.start_over()
        check(checkpointer, 3)


def test_a_load_is_under_the_contexts_of_jax_of_its_caller(make):
    checkpointer = make(every=None)
    assert checkpointer.save(1, {"n": np.arange(3.0)})
    with jax.enable_x64(True):
        restored = checkpointer.load(1, {"n": jax.Array})
    assert restored["n"].dtype == np.float64


def test_an_integer_of_any_type_is_a_step_and_nothing_else(make):
    checkpointer = make()
    calls = (
        checkpointer.should_save,
        lambda step: checkpointer.save(step, STATE),
        lambda step: checkpointer.record_metrics(step, {"loss": 1.5}),
        checkpointer.is_durable,
        checkpointer.load,
        checkpointer.metadata,
        checkpointer.delete,
        checkpointer.cancel,
    )
    refused = {"-1": -1, "1.0": 1.0, "True": True, "np.True_": np.True_, "'3'": "3"}
    refused |= {r"array\(\[3\]\)": np.array([3]), r"Array\(3., dtype": jnp.float32(3)}
    for name, step in refused.items():
        for call in calls:
            message = f"^{name}.* is not a step number; pass"
            with pytest.raises(errors.CheckpointError, match=message):
                call(step)
    for number, kind in enumerate((np.int64, np.uint8, np.array, jnp.int32), start=3):
        assert calls[0](kind(number))
        for call in calls[1:-2]:
            call(kind(number))
        assert type(checkpointer.latest.step) is int
        assert checkpointer.evaluations() == {number: {"loss": 1.5}}
        assert checkpointer.delete(kind(number))


def test_what_a_step_has_is_told_wherever_it_is_found(make, tmp_path):
    tree = {"layers": [jnp.arange(6.0).reshape(2, 3), jnp.ones((), jnp.bfloat16)]}
    checkpointables = {"state": tree, "ema": jnp.arange(4), "data": Counter(1)}
    metrics = {"loss": 0.5, "nested": {"a": [1, 2]}}
    with make(every=2, local=KEPT) as opened:
        opened.save(1, STATE)
        options = {"metrics": metrics, "custom_metadata": CUSTOM}
        opened.save_checkpointables(2, checkpointables, **options)
    for ram in ("ram", "other ram"):
        opened = make(ram=ram, local=KEPT)
        latest, held = opened.latest, opened.checkpointables_metadata()
        for each in (latest, held, opened.metadata(2), opened.checkpoints[-1]):
            assert noted(each) == (2, metrics, CUSTOM)
        assert latest.path == opened.directory / "2"
        assert latest.commit_timestamp == latest.time
        assert held.save == latest.save
        assert held.metadata["data"] is None
        assert held.metadata["ema"] == jax.ShapeDtypeStruct((4,), np.int32)
        assert held.metadata["state"]["layers"][1].dtype == jnp.bfloat16
        assert bits(opened.load(latest, held.metadata["state"])) == bits(tree)
        whole = {"state": tree, "ema": checkpointables["ema"]}
        assert bits(opened.load_checkpointables()) == bits(whole)
        with pytest.raises(
            errors.CheckpointError, match="not contain 'opt'; it contains"
        ):
            opened.metadata(checkpointable_name="opt")
        root = ocp.training.RootMetadata(directory=opened.directory)
        assert opened.root_metadata() == root
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        theirs = stock.metadata(2)
        assert noted(theirs) == (2, metrics, CUSTOM)
        assert abs((theirs.time - latest.time).total_seconds()) < 600
        assert opened.metadata(stock.latest).step == 2


def test_without_ram_a_result_is_there_when_the_step_is_in_storage(
    make, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    os.makedirs(tmp_path / "temporary")
    recorded = RecordedEvents()
    with make(ram=None, every=2, emit=recorded) as checkpointer:
        assert [save(checkpointer, step) for step in range(1, 5)] == [False, True] * 2
        assert checkpointer.latest.path == tmp_path / "steps" / "4"
        assert checkpointer.is_durable(4)
        response = checkpointer.save_async(5, STATE, force=True)
        assert response.result()
        assert stored(tmp_path) == [2, 4, 5]
        assert response.durable()
        check(checkpointer, 4, 4)
    for name in ("saved", "backed_up"):
        assert [each["step"] for each in recorded.named(name)] == [2, 4, 5]
    assert recorded.named("degraded") == []
    # Nothing is left on this machine.
    assert os.listdir(tmp_path / "temporary") == []
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        assert steps_of(stock) == [2, 4, 5]
        restored = stock.load_checkpointables(4, {"state": state(0)})["state"]
        assert bits(restored) == bits(state(4))


def test_an_interrupted_save_is_reported_and_removed(make, tmp_path):
    half = tmp_path / "steps" / "4.orbax-checkpoint-tmp-000000000000001"
    recorded = RecordedEvents()
    with make(ram=None) as checkpointer:
        checkpointer.save(2, STATE)
    (half / "state").mkdir(parents=True)
    make(ram=None, emit=recorded).wait()
    assert not half.exists()
    (event,) = recorded.named("step_interrupted")
    assert (event["step"], event["resume_step"]) == (4, 2)
    assert event["path"] == str(half)


CAPTURES = {"auto": 8, "host": 1, "device": 8, "wait": 1}


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_loop_that_donates_its_state_saves_each_step_as_it_was(make, capture):
    devices = jax.devices()[: CAPTURES[capture]]
    mesh = jax.make_mesh((len(devices),), ("a",), devices=devices)
    over = NamedSharding(mesh, PartitionSpec("a"))
    add_1 = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {"large": jax.device_put(jnp.zeros((8, 2**14)), over), "small": jnp.zeros(8)}
    checkpointer = make(ram=None, capture=capture)
    saved = {}
    for step in range(3):
        response = checkpointer.save_async(step, tree)
        if capture == "wait":
            # It is in storage when the call returns.
            assert checkpointer.is_durable(step)
            assert response.durable()
        saved[step] = bits(tree)
        tree = add_1(tree)
    checkpointer.wait()
    for step, expected in saved.items():
        assert bits(checkpointer.load(step, tree)) == expected


def save_all(checkpointer, *steps):
    for step in steps:
        assert checkpointer.save(step, {"n": step})
        # A backup that is late is skipped.
        checkpointer.wait()


def raise_versions(directory, step):
    """Has a step, in each place below a directory, saved by a later version."""
    for path in directory.rglob("manifest-*"):
        fields, blobs = checked_blobs.parse(path.read_bytes(), what="", version=1)
        if fields["step_id"][0] == step:
            del fields["version"], fields["sizes"]
            path.write_bytes(checked_blobs.to_bytes(fields, blobs, version=2))
    for path in directory.glob(f"**/{step}/commit_success.txt"):
        path.write_text(path.read_text().replace('"version": 1', '"version": 2'))


def test_a_step_of_a_later_version_in_storage_is_an_error_and_stays(make, tmp_path):
    steps = tmp_path / "steps"
    with make() as checkpointer:
        save_all(checkpointer, 2, 4)
    raise_versions(tmp_path, 4)
    for ram in ("ram", None):
        with pytest.raises(errors.CheckpointError, match="later version") as error:
            make(ram=ram)
        assert f"manifest {steps}/4/manifest-" in str(error.value)
        said = "it has format version 2, but this release reads version 1"
        assert said in str(error.value)
    shutil.move(steps / "4", tmp_path)
    with make() as checkpointer:
        assert checkpointer.latest.step == 2
        save_all(checkpointer, 6)
    # An older one does not matter, and is not removed.
    shutil.move(tmp_path / "4", steps)
    with make(keep=ocp.training.preservation_policies.LatestN(1)) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [2, 6]
        save_all(checkpointer, 8)
    assert {each.name for each in steps.glob("?")} == {"4", "8"}


def test_a_step_of_a_later_version_in_ram_is_passed_over(make, tmp_path):
    with make(every=2) as checkpointer:
        # The last one in RAM alone.
        save_all(checkpointer, 2, 4, 5)
    raise_versions(tmp_path / "ram", 5)
    recorded = RecordedEvents()
    with make(every=2, emit=recorded) as checkpointer:
        assert checkpointer.load() == {"n": 4}
        save_all(checkpointer, 6)
    passed_over = recorded.named("step_passed_over")
    assert {each["step"] for each in passed_over} == {5}
    assert "it has format version 2" in passed_over[0]["why"]
    assert [*tmp_path.glob("ram/hosts/0/5-*")]


@pytest.fixture
def slow():
    """A component whose state is written once it is released."""
    slow = Failing(blocks=True)
    slow.save_timeout_secs = 600
    return slow


def leave(checkpointer, slow, error, act=lambda: None):
    """Saves two steps, and raises while the last one is not written."""
    with checkpointer:
        checkpointer.save_async(1, STATE)
        checkpointer.save_checkpointables_async(2, {"state": STATE, "slow": slow})
        act()
        raise error


@pytest.mark.parametrize(
    ("kind", "ram"),
    [(ValueError, "ram"), (KeyboardInterrupt, None), (SystemExit, "ram")],
)
def test_a_save_in_flight_is_finished(make, tmp_path, slow, ram, kind):
    threading.Timer(0.1, slow.released.set).start()
    with pytest.raises(kind, match="stop"):
        leave(make(ram=ram), slow, kind("stop"))
    assert 2 in stored(tmp_path)
    assert make(ram=ram).latest.step == 2


def test_a_second_interruption_ends_the_wait(tmp_path, slow):
    tiers = [Local(tmp_path / "ram"), Persistent(tmp_path, every=1)]
    # While the end of the block waits, as soon as it says so.
    press = functools.partial(ctrl_c.pressed_during, lambda: None)
    with pytest.raises(KeyboardInterrupt) as caught:
        leave(frontend.Checkpointer(tiers), slow, ValueError("stop"), press)
    assert str(caught.value.__context__) == "stop"
    # Its hosts were released, and what was whole is there.
    with frontend.Checkpointer(tiers) as again:
        assert again.latest.step == 1
        slow.released.set()


UNCLOSED = """
import sys
import jax.numpy as jnp
import elastic_ckpt as ec

checkpointer = ec.Checkpointer([ec.Persistent(sys.argv[1] + "/steps", every=1)])
for step in (1, 2, 3):
    checkpointer.save_async(step, {"w": jnp.full(100_000, step)})
raise ValueError("stop")
"""


@pytest.mark.slow
def test_a_program_that_fails_and_closes_nothing_loses_no_save(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert 3 in stored(tmp_path)
    assert ended.stderr.count("was not closed; finishing its saves now") == 1
    assert ended.stderr.count("Traceback") == 1
