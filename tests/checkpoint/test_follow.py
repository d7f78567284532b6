"""A program beside a run follows its steps in RAM, by the agents that it records."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from benchmarks.relay import Relay
from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import follow
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.persistent import leases, run_files
from tests.tiers import tiered_steps


def running(directory, *, every=None, keep=10):
    """A run of one host, the agent of which others can ask."""
    newest = ocp.training.preservation_policies.LatestN(keep)
    tiers = [
        ec.Local(directory / "ram", keep=newest),
        ec.Peers(interface="127.0.0.1"),
        ec.Persistent(directory / "steps", every=every or 10**6),
    ]
    return frontend.Checkpointer(tiers, run=tiered_steps.RUN, slice_name="s0")


def followed(directory, **options):
    # Longer than any test: what a follower waits for comes.
    options = {"timeout_secs": 600, "poll_secs": 0.05, **options}
    options.setdefault("secret_file", directory / "ram" / "secret")
    return ec.watch_steps(directory / "steps", **options)


def check(step, number):
    """A step that was followed has the values that were saved."""
    assert step.step == number
    loaded = step.load()["params"]
    expected = jax.tree.map(np.asarray, tiered_steps.state(number)["params"])
    assert loaded.keys() == expected.keys()
    for name, leaf in loaded.items():
        assert np.asarray(leaf).tobytes() == expected[name].tobytes()


def spoil(directory, step, pattern="state/**/c/**/*"):
    """Removes files of a step in RAM, by default its values."""
    for file in directory.glob(f"ram/hosts/0/{step}-*/{pattern}"):
        if file.is_file():
            file.unlink()


def test_steps_in_ram_are_followed_but_for_those_that_are_gone(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    over = NamedSharding(mesh, PartitionSpec(None, None))
    wanted = {"params": {"w": jax.ShapeDtypeStruct((16, 6), np.float32, sharding=over)}}
    wrong, absent = tmp_path / "wrong", tmp_path / "no"
    wrong.write_text("not-the-secret-of-this-run")
    with running(tmp_path) as checkpointer:
        with contextlib.closing(followed(tmp_path)) as steps:
            for number in (1, 2):
                tiered_steps.save(checkpointer, number)
                step = next(steps)
                check(step, number)
                assert step.load(wanted)["params"]["w"].sharding.mesh == mesh
                assert step.load({"step": int}) == {"step": number}
            with pytest.raises(errors.CheckpointError, match="in the RAM of its run"):
                ocp.load(step.path)
            tiered_steps.save(checkpointer, 3, 4)
            spoil(tmp_path, 4)
            check(next(steps), 3)
        for path, said in (
            (wrong, f"secret in {wrong}"),
            (absent, "does not contain a secret"),
        ):
            with pytest.raises(errors.RunError, match=said):
                next(followed(tmp_path, secret_file=path))
        # Before it was loaded once, nothing shows what is read of a step.
        with contextlib.closing(followed(tmp_path, after=4)) as steps:
            tiered_steps.save(checkpointer, 5)
            step = next(steps)
            spoil(tmp_path, 5)
            with pytest.raises(leases.StepGoneError, match="load the next step"):
                step.load()
            tiered_steps.save(checkpointer, 6)
            check(next(steps), 6)
        tiered_steps.save(checkpointer, 7)
        spoil(tmp_path, 7, "manifest-*")
        assert list(followed(tmp_path, after=6, timeout_secs=0)) == []


def test_after_a_rollback_what_is_saved_again_is_yielded_and_nothing_else(tmp_path):
    with running(tmp_path) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2, 3)
        steps = followed(tmp_path, timeout_secs=0)
        before = next(steps)
        checkpointer.load(1, roll_back=True)
        assert checkpointer.save(2, jax.numpy.float32(7))
        again = next(steps)
        assert (before.step, again.step, float(again.load())) == (3, 2, 7)
        assert again.save > before.save
        # The newer step is still in RAM, and abandoned.
        assert list(steps) == []


def test_only_leaves_that_changed_are_moved(tmp_path):
    num_bytes = 2**18
    frozen = np.random.default_rng(0).random(num_bytes // 8)

    def state(step):
        hot = np.random.default_rng(step).random(num_bytes // 8)
        return {"params": {"frozen": frozen, "hot": hot}, "opt": {"hot": -hot}}

    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(running(tmp_path, keep=3))
        checkpointer.save(1, state(1))
        checkpointer.wait()
        agents = run_files.read_agents(tmp_path / "steps")
        ((machine, url),) = agents.urls.items()
        relay = stack.enter_context(Relay(url))
        of_relay = {machine: run_files.Seen(relay.url, 0)}
        relayed = run_files.RunAgents(agents.run, of_relay)
        run_files.write_agents(tmp_path / "steps", relayed)
        # One look at a time, so that waiting moves nothing.
        steps = followed(tmp_path, timeout_secs=0, after=0)
        stack.callback(steps.close)
        first = next(steps).load()
        assert 2 * num_bytes < relay.num_bytes < 2.2 * num_bytes
        for number in (2, 3):
            before = relay.num_bytes
            checkpointer.save(number, state(number))
            checkpointer.wait()
            loaded = next(steps).load()["params"]
            assert num_bytes < relay.num_bytes - before < 1.2 * num_bytes
            jax.tree.map(np.testing.assert_array_equal, loaded, state(number)["params"])
        # What was handed out stays as it was.
        assert first["params"]["hot"].tobytes() == state(1)["params"]["hot"].tobytes()
        with pytest.raises(ValueError, match="read-only"):
            loaded["hot"][:] = 0


def test_steps_in_storage_are_followed_under_a_lease(tmp_path, caplog):
    with running(tmp_path, every=2, keep=1) as checkpointer:
        tiered_steps.save(checkpointer, 2)
        # It is in RAM and in storage.
        assert [each.step for each in followed(tmp_path, timeout_secs=0.2)] == [2]
        # Metrics of a step in RAM count for the step before it in storage.
        tiered_steps.save(checkpointer, 3)
        step = next(followed(tmp_path))
        assert step.step == 3
        ec.record_metrics(step, {"loss": 0.5})
        tiered_steps.save(checkpointer, 4)
        assert checkpointer.checkpoints[0].metrics == {"loss": 0.5}
    # The hosts are gone.
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        orbax.save(5, {"params": tiered_steps.state(5)["params"]})
    numbers = []
    for step in followed(tmp_path, secret_file=None, timeout_secs=0):
        assert step.path == tmp_path / "steps" / str(step.step)
        assert list((tmp_path / "steps" / leases.DIRECTORY).iterdir())
        numbers.append(step.step)
        check(step, numbers[-1])
    assert numbers == [2, 4, 5]
    assert not list((tmp_path / "steps" / leases.DIRECTORY).iterdir())
    (tmp_path / "steps" / run_files.AGENTS).unlink(missing_ok=True)
    assert next(followed(tmp_path, after=4, timeout_secs=0)).step == 5
    assert "agents.json lists no agents" in caplog.text


def test_a_step_comes_once_its_older_save_is_removed(tmp_path, monkeypatch):
    with running(tmp_path, every=1) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
    announced = tmp_path / "steps" / leases.DIRECTORY / "2-0.removing"
    announced.parent.mkdir(exist_ok=True)
    announced.write_bytes(b"")
    waits = []

    def sleep(secs):
        waits.append(secs)
        announced.unlink()

    monkeypatch.setattr(follow.time, "sleep", sleep)
    with contextlib.closing(followed(tmp_path, secret_file=None)) as steps:
        assert [next(steps).step, next(steps).step] == [1, 2]
    assert len(waits) == 1


def test_a_run_without_storage_is_followed_by_its_directory_in_ram(tmp_path):
    tiers = [ec.Local(tmp_path / "ram"), ec.Peers(interface="127.0.0.1")]
    with frontend.Checkpointer(tiers, run="run", slice_name="s0") as checkpointer:
        steps = ec.watch_steps(tmp_path / "ram", timeout_secs=0)
        tiered_steps.save(checkpointer, 1)
        step = next(steps)
        check(step, 1)
        with pytest.raises(errors.CheckpointError, match="recorded in persistent st"):
            ec.record_metrics(step, {"loss": 0.5})
        assert list(steps) == []
    assert list(ec.watch_steps(tmp_path / "ram", timeout_secs=0)) == []


@pytest.mark.slow
def test_the_next_world_is_followed_though_its_agent_has_moved(tmp_path):
    with running(tmp_path) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        steps = followed(tmp_path)
        assert next(steps).step == 1
    with running(tmp_path) as checkpointer:
        checkpointer.load(None)
        tiered_steps.save(checkpointer, 2)
        check(next(steps), 2)
        steps.close()
