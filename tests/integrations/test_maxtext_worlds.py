"""What each world of a run of MaxText gives to MaxText, and what is recorded."""

import types

from elastic_ckpt.core import events, topology
from elastic_ckpt.inspect import run_files
from elastic_ckpt.integrations import maxtext_keys, maxtext_worlds
from elastic_ckpt.training import configured, launch
from tests.integrations import stand_in

RUN = ["run_name=a", "base_output_directory=/runs", "per_device_batch_size=6"]


def supervised(*arguments):
    return maxtext_keys.supervised(maxtext_keys.given(arguments))


def test_fewer_devices_take_as_many_rows_in_more_parts():
    given = [*RUN, "hosts=4", "eval_per_device_batch_size=3"]
    settings = maxtext_worlds.in_world(
        given,
        supervised(*given),
        types.SimpleNamespace(
            topology=topology.Topology(hosts=3, slices=3, devices=3),
            microbatches=2,
            ram_directory="/ram/slice-1/tiny",
        ),
    )
    assert "per_device_batch_size=4" in settings
    assert "gradient_accumulation_steps=2" in settings
    # An evaluation has the same rows in each world.
    assert "eval_per_device_batch_size=4" in settings
    assert "local_checkpoint_directory=/ram/slice-1" in settings
    # MaxText's own answer to lost slices needs Pathways.
    assert "elastic_enabled=False" in settings


def test_each_machine_has_an_address_certificate_and_time_to_save_of_its_own():
    config = supervised(
        *(*RUN, "hosts=2", "slices=2", "elastic_enabled=true", "elastic_machines=2"),
        *("elastic_machine=1", "peer_interface=10.0.0.2"),
        *("enable_multi_tier_checkpointing=true", "local_checkpoint_directory=/ram"),
        *("peer_tls_certificate=/tls/crt", "peer_tls_key=/tls/key"),
        "termination_grace_period_seconds=600",
    )
    own = launch.place(config, {"POD_IP": "10.0.0.1"})
    assert own == (range(1, 2), "10.0.0.2")
    served = configured.memory(config)
    assert (served.tls_certificate, served.tls_key) == ("/tls/crt", "/tls/key")
    assert 500 < configured.limits(config).grace_secs < 600


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


def test_the_metrics_of_a_run_on_several_hosts_are_recorded(tmp_path):
    given = [*RUN, f"base_output_directory={tmp_path}", "hosts=2", "steps=3"]
    with stand_in.installed(tmp_path):
        maxtext_worlds.run(
            supervised(*given), given, emit=events.nobody, train=report_steps
        )
    recorded = run_files.read_metrics(tmp_path / "a" / "metrics")
    lines = [line for each in recorded.values() for line in each]
    wanted = "/elastic_ckpt/train/loss"
    losses = [
        (each["step"], each["last"]) for each in lines if each["metric"] == wanted
    ]
    assert losses == [(1, 5), (2, 4), (3, 3)]
