"""A program beside a run follows its steps in RAM, by the agents that it records."""

import contextlib

import jax
import numpy as np
import pytest
import trustme
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from benchmarks.relay import Relay
from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.persistent import leases, run_agents
from tests.tiers import tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

NEVER = 10**6
# Longer than any test: what a follower waits for comes.
LONG_SECS = 600


def running(tmp_path, *, every=NEVER, keep=1, **peers):
    """A run of one host, the agent of which others can ask."""
    newest = ocp.training.preservation_policies.LatestN(keep)
    tiers = [
        ec.Local(tmp_path / "ram", keep=newest),
        ec.Peers(**{"interface": "127.0.0.1", **peers}),
        ec.Persistent(tmp_path / "steps", every=every),
    ]
    return frontend.Checkpointer(tiers, run=tiered_steps.RUN, slice_name="s0")


def followed(tmp_path, **options):
    options = {"timeout_secs": LONG_SECS, "poll_secs": 0.05, **options}
    options.setdefault("secret_file", tmp_path / "ram" / "secret")
    return ec.watch_steps(tmp_path / "steps", **options)


def params(step):
    return jax.tree.map(np.asarray, tiered_steps.state(step)["params"])


def check(loaded, step):
    expected = params(step)
    assert loaded.keys() == expected.keys()
    for name, leaf in loaded.items():
        assert np.asarray(leaf).tobytes() == expected[name].tobytes()


def spoil(tmp_path, step):
    """Removes the values of a step in RAM, and leaves its manifest."""
    (directory,) = (tmp_path / "ram" / "hosts" / "0").glob(f"{step}-*")
    for chunk in (directory / "state").rglob("*"):
        if chunk.is_file() and chunk.name != "zarr.json":
            chunk.unlink()


def test_each_step_is_followed_in_ram_bit_for_bit(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    wanted = {
        "params": {
            "w": jax.ShapeDtypeStruct(
                (16, 6),
                np.float32,
                sharding=NamedSharding(mesh, PartitionSpec(None, None)),
            ),
            "b": np.zeros(6, jax.numpy.bfloat16),
        }
    }
    with running(tmp_path) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        steps = followed(tmp_path)
        for number in (1, 2, 3):
            step = next(steps)
            assert step.step == number
            check(step.load(wanted)["params"], number)
            check(step.load()["params"], number)
            assert step.load({"step": int}) == {"step": number}
            tiered_steps.save(checkpointer, number + 1)
        assert step.load(wanted)["params"]["w"].sharding.mesh == mesh
        with pytest.raises(errors.CheckpointError, match="in the RAM of its run"):
            ocp.load(step.path)
        with pytest.raises(AttributeError, match=r"called step\.path\.name now"):
            step.name  # noqa: B018
        steps.close()
    assert not list((tmp_path / "steps").glob("[0-9]*"))


def test_a_follower_that_is_slower_than_the_run_takes_the_newest_step(tmp_path):
    with running(tmp_path, keep=10) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
        steps = followed(tmp_path)
        assert next(steps).step == 2
        tiered_steps.save(checkpointer, 3, 4, 5)
        assert next(steps).step == 5
        assert [each.step for each in followed(tmp_path, after=4, timeout_secs=0)] == [
            5
        ]
        assert list(followed(tmp_path, after=5, timeout_secs=0)) == []
        steps.close()


def test_only_leaves_that_changed_are_moved(tmp_path):
    num_bytes = 2**20
    frozen = np.random.default_rng(0).random(num_bytes // 8)

    def state(step):
        hot = np.random.default_rng(step).random(num_bytes // 8)
        params = {"frozen": frozen, "hot": hot}
        return {"params": params, "opt": {"hot": -hot}}

    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(running(tmp_path, keep=3))
        checkpointer.save(1, state(1))
        checkpointer.wait()
        agents = run_agents.read(tmp_path / "steps")
        ((machine, url),) = agents.urls.items()
        relay = stack.enter_context(Relay(url))
        run_agents.write(
            tmp_path / "steps",
            run_agents.RunAgents(run=agents.run, urls={machine: relay.url}),
        )
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


def test_a_step_that_goes_before_it_is_read_is_passed_over(tmp_path):
    with running(tmp_path, keep=10) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        steps = followed(tmp_path)
        check(next(steps).load()["params"], 1)
        tiered_steps.save(checkpointer, 2, 3)
        spoil(tmp_path, 3)
        step = next(steps)
        check(step.load()["params"], 2)
        tiered_steps.save(checkpointer, 4)
        assert next(steps).step == 4
        steps.close()


def test_a_step_that_goes_before_its_first_load_is_an_error_that_says_so(tmp_path):
    with running(tmp_path) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        steps = followed(tmp_path)
        step = next(steps)
        spoil(tmp_path, 1)
        with pytest.raises(leases.StepGoneError, match="load the next one"):
            step.load()
        tiered_steps.save(checkpointer, 2)
        check(next(steps).load()["params"], 2)
        steps.close()


def test_a_step_without_a_part_is_no_step(tmp_path):
    with running(tmp_path, keep=10) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
        (manifest,) = (tmp_path / "ram" / "hosts" / "0").glob("2-*/manifest-*")
        manifest.unlink()
        assert [each.step for each in followed(tmp_path, timeout_secs=0)] == [1]


def test_after_a_rollback_what_is_saved_again_is_yielded_and_nothing_else(tmp_path):
    with running(tmp_path, keep=10) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2, 3)
        steps = followed(tmp_path, timeout_secs=0)
        before = next(steps)
        checkpointer.load(1, go_back=True)
        tiered_steps.save(checkpointer, 2)
        again = next(steps)
        assert [before.step, again.step] == [3, 2]
        assert again.save > before.save
        # Step 3 is still in RAM, and abandoned.
        assert list(steps) == []


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


def test_a_wrong_secret_is_an_error_that_names_the_file(tmp_path):
    wrong = tmp_path / "wrong"
    with running(tmp_path) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        wrong.write_text("not-the-secret-of-this-run")
        with pytest.raises(errors.RunError, match=f"secret in {wrong}"):
            next(followed(tmp_path, secret_file=wrong))
    with pytest.raises(errors.RunError, match="no such file"):
        next(followed(tmp_path, secret_file=tmp_path / "missing"))


def test_a_step_in_ram_and_in_storage_is_yielded_once(tmp_path):
    with running(tmp_path, every=1) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        steps = followed(tmp_path, timeout_secs=0.2)
        assert [each.step for each in steps] == [1]
    # The hosts are gone: the same step in storage, under a lease.
    (step,) = followed(tmp_path, timeout_secs=0)
    check(step.load()["params"], 1)
    assert step.path == tmp_path / "steps" / "1"


def test_where_no_agents_are_recorded_steps_are_followed_in_storage(tmp_path, caplog):
    tiers = [
        ec.Local(tmp_path / "ram"),
        ec.Persistent(tmp_path / "steps", every=1),
    ]
    with frontend.Checkpointer(tiers, run="run", slice_name="s0") as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
        steps = followed(tmp_path)
        step = next(steps)
        assert step.step == 2
        assert leases_of(tmp_path)
        loaded = ocp.load_checkpointables(step.path, {"state": None})["state"]
        check(loaded["params"], 2)
        steps.close()
    assert not leases_of(tmp_path)
    warnings = [each.getMessage() for each in caplog.records]
    assert any("agents.json names no agents" in each for each in warnings)


def leases_of(tmp_path):
    return list((tmp_path / "steps" / leases.DIRECTORY).iterdir())


def test_steps_in_storage_load_alike_and_those_of_plain_orbax_too(tmp_path):
    with running(tmp_path, every=1) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        state = {"params": tiered_steps.state(3)["params"], "step": 3}
        orbax.save_checkpointables(3, {"state": state})
    steps = followed(tmp_path, secret_file=None, timeout_secs=0)
    for number, step in enumerate(steps, start=1):
        wanted = {"w": np.zeros((16, 6), np.float32)}
        loaded = step.load({"params": wanted})
        assert loaded["params"]["w"].tobytes() == params(number)["w"].tobytes()
        assert step.path == tmp_path / "steps" / str(number)
    assert number == 3


def test_metrics_of_a_step_in_ram_count_for_the_step_before_it_in_storage(tmp_path):
    with running(tmp_path, every=2) as checkpointer:
        tiered_steps.save(checkpointer, 2)
        tiered_steps.save(checkpointer, 3)
        step = next(followed(tmp_path))
        assert step.step == 3
        ec.record_metrics(step, {"loss": 0.5})
        tiered_steps.save(checkpointer, 4)
        assert checkpointer.evaluations() == {3: {"loss": 0.5}}
        by_step = {each.step: each.metrics for each in checkpointer.checkpoints}
    assert by_step[2] == {"loss": 0.5}


def test_a_run_without_storage_is_followed_by_its_directory_in_ram(tmp_path):
    tiers = [ec.Local(tmp_path / "ram"), ec.Peers(interface="127.0.0.1")]
    with frontend.Checkpointer(tiers, run="run", slice_name="s0") as checkpointer:
        steps = ec.watch_steps(tmp_path / "ram", timeout_secs=0)
        for number in (1, 2):
            tiered_steps.save(checkpointer, number)
            step = next(steps)
            check(step.load()["params"], number)
        with pytest.raises(errors.CheckpointError, match="belong in persistent stor"):
            ec.record_metrics(step, {"loss": 0.5})
        assert list(steps) == []
    assert list(ec.watch_steps(tmp_path / "ram", timeout_secs=0)) == []


def test_a_tree_that_does_not_fit_names_the_leaf(tmp_path):
    def array(*shape):
        return np.zeros(shape, np.float32)

    with running(tmp_path) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        steps = followed(tmp_path)
        step = next(steps)
        for tree, said in (
            ({"params": {"x": array(2)}}, r"state/params/x: saved nothing, now \[2\]"),
            ({"params": {"w": array(2)}}, r"w: saved \[16, 6\], now \[2\]"),
        ):
            with pytest.raises(errors.OtherModelError, match=said):
                step.load(tree)
        with pytest.raises(errors.CheckpointError, match=r"named \['other'\]"):
            step.load(checkpointable_name="other")
        # They were not read, so they pass over no step.
        tiered_steps.save(checkpointer, 2)
        check(next(steps).load()["params"], 2)
        steps.close()


@pytest.mark.slow
def test_agents_with_certificates_are_followed(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "host.pem")
    own, ca = str(tmp_path / "host.pem"), str(tmp_path / "ca.pem")
    tls = ec.TlsFiles(certificate=own, key=own, authority=ca)
    with running(tmp_path, tls=tls) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        steps = followed(tmp_path, tls_authority=ca)
        check(next(steps).load()["params"], 1)
        steps.close()
        assert list(followed(tmp_path, timeout_secs=0)) == []
