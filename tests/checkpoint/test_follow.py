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

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


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


class Run:
    """A run that several tests follow, each from its newest step on."""

    def __init__(self, directory, checkpointer):
        self.directory = directory
        self.checkpointer = checkpointer
        self.newest = 0

    def save(self):
        """Saves a step; returns its number."""
        self.newest += 1
        tiered_steps.save(self.checkpointer, self.newest)
        return self.newest

    def follow(self, **options):
        return followed(self.directory, after=self.newest, **options)

    def spoil(self, step, pattern):
        """Removes files of a step in RAM."""
        for file in self.directory.glob(f"ram/hosts/0/{step}-*/{pattern}"):
            if file.is_file():
                file.unlink()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("followed")
    with running(directory) as checkpointer:
        yield Run(directory, checkpointer)


def test_each_step_is_followed_in_ram_bit_for_bit(run):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    over = NamedSharding(mesh, PartitionSpec(None, None))
    wanted = {"params": {"w": jax.ShapeDtypeStruct((16, 6), np.float32, sharding=over)}}
    with contextlib.closing(run.follow()) as steps:
        for _ in range(2):
            number = run.save()
            step = next(steps)
            check(step, number)
            assert step.load(wanted)["params"]["w"].sharding.mesh == mesh
            assert step.load({"step": int}) == {"step": number}
    with pytest.raises(errors.CheckpointError, match="in the RAM of its run"):
        ocp.load(step.path)
    assert not list((run.directory / "steps").glob("[0-9]*"))


def test_a_step_whose_parts_are_gone_is_passed_over_or_an_error_that_says_so(run):
    values = "state/**/c/**/*"
    with contextlib.closing(run.follow()) as steps:
        check(next_after(run, steps), run.newest)
        good = run.save()
        run.spoil(run.save(), values)
        check(next(steps), good)
        check(next_after(run, steps), run.newest)
    # Before it was loaded once, nothing shows what is read of a step.
    with contextlib.closing(run.follow()) as steps:
        step = next_after(run, steps)
        run.spoil(step.step, values)
        with pytest.raises(leases.StepGoneError, match="load the next one"):
            step.load()
        check(next_after(run, steps), run.newest)
    steps = run.follow(timeout_secs=0)
    run.spoil(run.save(), "manifest-*")
    assert list(steps) == []


def next_after(run, steps):
    """The step that is saved next."""
    run.save()
    return next(steps)


def test_a_wrong_secret_is_an_error_that_names_the_file(run, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-secret-of-this-run")
    absent = tmp_path / "no"
    for path, said in ((wrong, f"secret in {wrong}"), (absent, "holds no secret")):
        with pytest.raises(errors.RunError, match=said):
            next(run.follow(secret_file=path))


def test_after_a_rollback_what_is_saved_again_is_yielded_and_nothing_else(run):
    old, _, newest = run.save(), run.save(), run.save()
    steps = followed(run.directory, timeout_secs=0)
    before = next(steps)
    run.checkpointer.load(old, go_back=True)
    run.newest = old
    again = next_after(run, steps)
    assert [before.step, again.step] == [newest, old + 1]
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


def test_steps_in_storage_are_followed_under_a_lease_also_those_of_plain_orbax(
    tmp_path, caplog
):
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
    assert "agents.json names no agents" in caplog.text


def test_a_step_of_which_an_older_save_is_being_removed_comes_later(
    tmp_path, monkeypatch
):
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
        with pytest.raises(errors.CheckpointError, match="belong in persistent stor"):
            ec.record_metrics(step, {"loss": 0.5})
        assert list(steps) == []
    assert list(ec.watch_steps(tmp_path / "ram", timeout_secs=0)) == []
