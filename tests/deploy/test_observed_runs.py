"""Real runs, scraped by a real Prometheus: alerts fire on faults, and only then.

The times of the rules are a sixtieth of those that ship. A slow machine only delays
what these tests wait for.
"""

import contextlib
import signal
import time

import pytest

from elastic_ckpt.application import run_directory
from elastic_ckpt.deploy import alerts
from tests import process_tree, prometheus_server, runs
from tests.deploy import observed_callbacks

SCALE = 1 / 60
# It ends long before that.
STEPS = 1_000_000


@contextlib.contextmanager
def training(config, *settings):
    """A run, killed at the end with all that it has started."""
    output = config.parent / "output.txt"
    # Its hosts are its own children then.
    group = {"leads_group": True}
    with runs.Started("train", config, *settings, output=output, **group) as started:
        try:
            yield started
        finally:
            kill(started)


def kill(started):
    pids = process_tree.of(started.pid)
    process_tree.send(pids, signal.SIGKILL)
    started.wait()
    process_tree.wait_for_end(pids)


def scraped(tmp_path, jobs):
    return prometheus_server.running(
        tmp_path / "prometheus", alerts.rules(scale=SCALE), jobs
    )


@contextlib.contextmanager
def storage_broken(run):
    """Storage takes nothing: a file is where the directory of the steps was."""
    steps = run / "checkpoints"
    aside = run / "aside"
    steps.rename(aside)
    steps.write_text("")
    yield
    steps.unlink()
    aside.rename(steps)


def fires_of(server):
    """Waits until an alert has fired, which says what it means."""

    def fires(name, within_secs=None):
        began = time.monotonic()

        def is_over():
            waited = time.monotonic() - began
            return within_secs is not None and waited > within_secs

        prometheus_server.until(
            lambda: name in server.firing() or is_over(), what=f"{name} fires"
        )
        for alert in server.alerts():
            for text in alert["annotations"].values():
                assert "error" not in text, alert
        return name in server.firing()

    return fires


@pytest.mark.slow(minutes=3)
def test_a_run_that_computes_wrong_values_and_cannot_save_raises_its_alerts(
    tmp_path, corpus
):
    port = prometheus_server.free_ports(3)
    config = runs.write_config(
        tmp_path,
        corpus,
        steps=STEPS,
        hosts=2,
        # The weights overflow.
        learning_rate=1e38,
        divergence_action="warn",
        replica_validation="full",
        training_callbacks=observed_callbacks.named(observed_callbacks.differs),
        # Each step waits for its save.
        checkpoint_period=1,
        max_num_checkpoints_to_keep=2,
        async_checkpointing=False,
        prometheus_port=port,
    )
    run = tmp_path / "tiny"
    with (
        scraped(tmp_path, {"tiny": range(port, port + 3)}) as server,
        training(config),
    ):
        fires = fires_of(server)
        assert fires("RunLossNotFinite")
        assert fires("RunDiverged")
        assert fires("RunReplicasDiffer")
        assert fires("RunBlockedBySaves")
        with storage_broken(run):
            assert fires("RunSavesFail")
            assert fires("RunSavesNothing")


@pytest.mark.slow(minutes=2)
def test_a_run_without_read_ahead_that_is_started_twice_raises_its_alerts(
    tmp_path, corpus
):
    # A host and a supervisor each.
    port = prometheus_server.free_ports(4)
    config = runs.write_config(
        tmp_path,
        corpus,
        steps=STEPS,
        # The claims of its worlds decide between two starts.
        elastic_enabled=True,
        # Its first save claims its world, and it makes no other.
        checkpoint_period=STEPS,
        checkpoint_steps_to_keep="4",
        # Data are made while the loop waits, and more of them than it has to compute.
        data_read_ahead_batches=0,
        global_batch_size=256,
        max_target_length=8,
    )
    run = tmp_path / "tiny"
    with scraped(tmp_path, {"tiny": range(port, port + 4)}) as server:
        fires = fires_of(server)
        with training(config, f"prometheus_port={port}") as first:
            assert fires("RunWaitsForData")
            prometheus_server.until(
                lambda: runs.saved_steps(run) == [4], what="the first save"
            )
            # It stands still, on a file system that machines share and without locks.
            pids = process_tree.of(first.pid)
            process_tree.send(pids, signal.SIGSTOP)
            (run / run_directory.LOCK).unlink()
            with training(config, f"prometheus_port={port + 2}"):
                prometheus_server.until(
                    lambda: server.value("max(elastic_ckpt_train_claim)") == 2,
                    what="the second start claims its world",
                )
                process_tree.send(pids, signal.SIGCONT)
                assert fires("RunClaimsDisagree")
