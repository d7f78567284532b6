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

NEVER = 10**6
# Longer than any test: what a follower waits for comes.
LONG_SECS = 600


def running(directory, *, every=NEVER, keep=10):
    """A run of one host, the agent of which others can ask."""
    newest = ocp.training.preservation_policies.LatestN(keep)
    tiers = [
        ec.Local(directory / "ram", keep=newest),
        ec.Peers(interface="127.0.0.1"),
        ec.Persistent(directory / "steps", every=every),
    ]
    return frontend.Checkpointer(tiers, run=tiered_steps.RUN, slice_name="s0")


def followed(directory, **options):
    options = {"timeout_secs": LONG_SECS, "poll_secs": 0.05, **options}
    options.setdefault("secret_file", directory / "ram" / "secret")
    return ec.watch_steps(directory / "steps", **options)


def params(step):
    return jax.tree.map(np.asarray, tiered_steps.state(step)["params"])


def check(loaded, step):
    expected = params(step)
    assert loaded.keys() == expected.keys()
    for name, leaf in loaded.items():
        assert np.asarray(leaf).tobytes() == expected[name].tobytes()


class Run:
    """A run that several tests follow, each from its newest step on."""

    def __init__(self, directory, checkpointer):
        self.directory = directory
        self.checkpointer = checkpointer
        self.newest = 0

    def save(self, number=1):
        """Saves steps; returns the newest."""
        for _ in range(number):
            self.newest += 1
            tiered_steps.save(self.checkpointer, self.newest)
        return self.newest

    def follow(self, **options):
        return followed(self.directory, after=self.newest, **options)

    def spoil(self, step):
        """Removes the values of a step in RAM, and leaves its manifest."""
        for chunk in (self._in_ram(step) / "state").rglob("*"):
            if chunk.is_file() and chunk.name != "zarr.json":
                chunk.unlink()

    def remove_manifest(self, step):
        (manifest,) = self._in_ram(step).glob("manifest-*")
        manifest.unlink()

    def _in_ram(self, step):
        (found,) = (self.directory / "ram" / "hosts" / "0").glob(f"{step}-*")
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("followed")
    with running(directory) as checkpointer:
        yield Run(directory, checkpointer)


def test_each_step_is_followed_in_ram_bit_for_bit(run):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    over = NamedSharding(mesh, PartitionSpec(None, None))
    wanted = {
        "params": {
            "w": jax.ShapeDtypeStruct((16, 6), np.float32, sharding=over),
            "b": np.zeros(6, jax.numpy.bfloat16),
        }
    }
    with contextlib.closing(run.follow()) as steps:
        for _ in range(3):
            number = run.save()
            step = next(steps)
            assert step.step == number
            loaded = step.load(wanted)["params"]
            check(loaded, number)
            assert loaded["w"].sharding.mesh == mesh
            check(step.load()["params"], number)
            assert step.load({"step": int}) == {"step": number}
    with pytest.raises(errors.CheckpointError, match="in the RAM of its run"):
        ocp.load(step.path)
    assert not list((run.directory / "steps").glob("[0-9]*"))


def test_a_step_whose_parts_are_gone_is_passed_over_or_an_error_that_says_so(run):
    with contextlib.closing(run.follow()) as steps:
        check(next_after(run, steps).load()["params"], run.newest)
        good = run.save()
        run.spoil(run.save())
        check(next(steps).load()["params"], good)
        step = next_after(run, steps)
        assert step.step == run.newest
    # Before it was loaded once, nothing shows what is read of a step.
    with contextlib.closing(run.follow()) as steps:
        step = next_after(run, steps)
        run.spoil(step.step)
        with pytest.raises(leases.StepGoneError, match="load the next one"):
            step.load()
        check(next_after(run, steps).load()["params"], run.newest)
    before = run.newest
    run.remove_manifest(run.save())
    assert list(followed(run.directory, after=before, timeout_secs=0)) == []


def next_after(run, steps):
    """The step that is saved next."""
    run.save()
    return next(steps)


def test_a_wrong_secret_is_an_error_that_names_the_file(run, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-secret-of-this-run")
    for path, said in (
        (wrong, f"secret in {wrong}"),
        (tmp_path / "no", "holds no secret"),
    ):
        with pytest.raises(errors.RunError, match=said):
            next(run.follow(secret_file=path))


def test_after_a_rollback_what_is_saved_again_is_yielded_and_nothing_else(run):
    old = run.save(3) - 2
    steps = followed(run.directory, timeout_secs=0)
    before = next(steps)
    run.checkpointer.load(old, go_back=True)
    run.newest = old
    again = next_after(run, steps)
    assert [before.step, again.step] == [old + 2, old + 1]
    assert again.save > before.save
    # The newer step is still in RAM, and abandoned.
    assert list(steps) == []


def test_only_leaves_that_changed_are_moved(tmp_path):
    num_bytes = 2**20
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
        assert 2 * num_bytes < relay.num_bytes < 2.1 * num_bytes
        for number in (2, 3):
            before = relay.num_bytes
            checkpointer.save(number, state(number))
            checkpointer.wait()
            loaded = next(steps).load()["params"]
            assert num_bytes < relay.num_bytes - before < 1.1 * num_bytes
            for name, values in state(number)["params"].items():
                assert loaded[name].tobytes() == values.tobytes()
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
        steps = followed(tmp_path, timeout_secs=0.2)
        assert [each.step for each in steps] == [2]
        # Metrics of a step in RAM count for the step before it in storage.
        tiered_steps.save(checkpointer, 3)
        step = next(followed(tmp_path))
        assert step.step == 3
        ec.record_metrics(step, {"loss": 0.5})
        tiered_steps.save(checkpointer, 4)
        assert checkpointer.evaluations() == {3: {"loss": 0.5}}
        by_step = {each.step: each.metrics for each in checkpointer.checkpoints}
        assert by_step[2] == {"loss": 0.5}
    # The hosts are gone.
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        state = {"params": tiered_steps.state(5)["params"], "step": 5}
        orbax.save_checkpointables(5, {"state": state})
    numbers = []
    for step in followed(tmp_path, secret_file=None, timeout_secs=0):
        assert step.path == tmp_path / "steps" / str(step.step)
        assert list((tmp_path / "steps" / leases.DIRECTORY).iterdir())
        loaded = step.load({"params": {"w": np.zeros((16, 6), np.float32)}})
        assert loaded["params"]["w"].tobytes() == params(step.step)["w"].tobytes()
        numbers.append(step.step)
    assert numbers == [2, 4, 5]
    assert not list((tmp_path / "steps" / leases.DIRECTORY).iterdir())
    (tmp_path / "steps" / run_files.AGENTS).unlink(missing_ok=True)
    assert next(followed(tmp_path, after=4, timeout_secs=0)).step == 5
    warnings = [each.getMessage() for each in caplog.records]
    assert any("agents.json names no agents" in each for each in warnings)


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
    steps = followed(tmp_path, secret_file=None)
    assert [next(steps).step, next(steps).step] == [1, 2]
    assert len(waits) == 1
    steps.close()


def test_a_run_without_storage_is_followed_by_its_directory_in_ram(tmp_path):
    tiers = [ec.Local(tmp_path / "ram"), ec.Peers(interface="127.0.0.1")]
    with frontend.Checkpointer(tiers, run="run", slice_name="s0") as checkpointer:
        steps = ec.watch_steps(tmp_path / "ram", timeout_secs=0)
        tiered_steps.save(checkpointer, 1)
        step = next(steps)
        check(step.load()["params"], 1)
        with pytest.raises(errors.CheckpointError, match="belong in persistent stor"):
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
        check(next(steps).load()["params"], 2)
        steps.close()
