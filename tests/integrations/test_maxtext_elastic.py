"""The configuration of MaxText's hosts, and what each world gives to MaxText."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import events, topology
from elastic_ckpt.elastic import kept_executables, world
from elastic_ckpt.inspect import run_files
from elastic_ckpt.integrations import maxtext, maxtext_config, maxtext_elastic
from elastic_ckpt.training import configured, machine_run
from tests.integrations import stand_in

RUN = ["run_name=a", "base_output_directory=/runs", "per_device_batch_size=6"]


def test_the_supervisor_reads_its_keys_among_those_of_maxtext(tmp_path):
    file = tmp_path / "run.yml"
    file.write_text(
        "base_config: base.yml\nhosts: 4\nsteps: 9\nmodel_name: llama2-7b\n"
    )
    given = [str(file), *RUN, "slices=2", "elastic_enabled=true", "dtype=float32"]
    config = maxtext_elastic.run_config(given)
    assert (config.world.hosts, config.world.slices, config.run.steps) == (4, 2, 9)
    assert config.elastic.elastic_enabled
    # The rows of all slices stay those of a batch when there are fewer.
    assert config.data.global_batch_size == 24


def test_the_defaults_in_maxtext_s_own_file_are_no_settings(tmp_path):
    file = tmp_path / "base.yml"
    file.write_text(
        "run_name: ''\ngradient_accumulation_steps: 1\nhardware: cpu\n"
        "enable_single_controller: false\nelastic_min_slice_count: -1\n"
        "multi_tier_checkpointing_backup_interval_minutes: null\n"
    )
    config = maxtext_elastic.run_config([str(file), "hosts=2", *RUN])
    assert config.run.run_name == "a"
    assert maxtext_elastic.run_config([str(file)]).world.hosts == 1


def test_fewer_devices_take_as_many_rows_in_more_parts():
    settings = maxtext_elastic.in_world(
        rows=24,
        eval_rows=12,
        num_devices=3,
        microbatches=2,
        ram_directory="/ram/slice-1/tiny",
    )
    assert "per_device_batch_size=4" in settings
    assert "gradient_accumulation_steps=2" in settings
    # An evaluation has the same rows in each world.
    assert "eval_per_device_batch_size=4" in settings
    assert "local_checkpoint_directory=/ram/slice-1" in settings
    # MaxText's own answer to lost slices needs Pathways.
    assert "elastic_enabled=False" in settings


def test_each_machine_has_an_address_certificate_and_time_to_save_of_its_own():
    machine = [
        *("hosts=2", "slices=2", "elastic_enabled=true", "elastic_machines=2"),
        *("elastic_machine=1", "peer_interface=10.0.0.2"),
        *("enable_multi_tier_checkpointing=true", "local_checkpoint_directory=/ram"),
        *("peer_tls_certificate=/tls/crt", "peer_tls_key=/tls/key"),
        "termination_grace_period_seconds=600",
    ]
    config = maxtext_elastic.run_config([*RUN, *machine])
    own = machine_run.place(config, {"POD_IP": "10.0.0.1"})
    assert (own.number, own.interface) == (1, "10.0.0.2")
    served = configured.memory(config)
    assert (served.tls_certificate, served.tls_key) == ("/tls/crt", "/tls/key")
    assert 500 < configured.limits(config).grace_secs < 600
    # MaxText sees none of these keys.
    given = dict(each.split("=") for each in machine) | {"num_logical_shards": 8}
    theirs, _ = maxtext_config.divide(given | {"enable_single_controller": True})
    assert not {key for key in theirs if key.startswith(("peer_", "termination_"))}


def test_machines_with_other_keys_of_maxtext_are_of_another_run(tmp_path):
    given = [*RUN, "hosts=2", "slices=2", "elastic_enabled=true"]
    config = maxtext_elastic.run_config(given)

    def digest(*more, file="dtype: bfloat16\n"):
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.yml"
        path.write_text(file)
        words = maxtext_config.given([str(path), *given, *more])
        return machine_run._digest(config, words)

    assert digest("elastic_machine=0") == digest("elastic_machine=1")
    assert digest(file="dtype: bfloat16\nelastic_machine: 1\n") == digest()
    assert digest("dtype=float32") == digest(file="dtype: float32\n") != digest()


def report_steps(arguments, config, world):
    """In place of MaxText on a host, what it reports of each step."""
    del arguments
    for step in range(1, config.run.steps + 1):
        if topology.is_primary():
            world.emit(
                "step",
                step=step,
                steps=config.run.steps,
                loss=6.0 - step,
                secs=0.5,
                tokens=100,
                learning_rate=0.1,
            )


def recorded_losses(run):
    """The steps and losses that are in the metrics of a run."""
    recorded = run_files.read_metrics(run / "metrics")
    lines = [line for each in recorded.values() for line in each]
    wanted = "/elastic_ckpt/train/loss"
    return [(each["step"], each["last"]) for each in lines if each["metric"] == wanted]


def test_the_metrics_of_a_run_on_several_hosts_are_recorded(tmp_path):
    given = [*RUN, f"base_output_directory={tmp_path}", "hosts=2", "steps=3"]
    with stand_in.installed(tmp_path):
        maxtext_elastic.run(
            maxtext_elastic.run_config(given),
            given,
            emit=events.nobody,
            train=report_steps,
        )
    assert recorded_losses(tmp_path / "a") == [(1, 5), (2, 4), (3, 3)]


@pytest.mark.usefixtures("without_jax_cache")
def test_a_world_loads_the_step_that_maxtext_has_compiled_in_one_before():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def batch(rows):
        return {"inputs": jax.device_put(np.arange(float(rows)), sharding)}

    def steps(kept):
        """MaxText's calls in a world: lower, compile, then the step itself."""
        emitted = []
        this = world.World(
            number=1,
            slices=(0,),
            slice_name="0",
            emit=lambda name, **_: emitted.append(name),
            _between=world.BetweenWorlds(executables=kept),
        )
        # Code that closes over an array, as MaxText's does.
        decay = jax.numpy.float32(0.5)

        @jax.jit
        def train_step(state, batch):
            return state * decay + batch["inputs"].sum(), {"loss": state[0]}

        states = []
        step = maxtext.KeptStep(train_step, world=this, note=states.append)
        state = jax.device_put(np.arange(8, dtype=np.float32), sharding)
        compiled = step.lower(state, batch(8)).compile(compiler_options={})
        assert compiled.memory_analysis() is not None
        trained, metrics = step(state, batch(8))
        # In a ramp the next batch is larger.
        trained, _ = step(trained, batch(16))
        assert states[-1] is trained
        return np.asarray(trained), np.asarray(metrics["loss"]), emitted

    with kept_executables.kept() as kept:
        first, loss, emitted = steps(kept)
        assert emitted == 2 * ["compile_started", "compiled"]
        second, same_loss, emitted = steps(kept)
        assert emitted == 2 * ["executable_loaded"]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(loss, same_loss)
