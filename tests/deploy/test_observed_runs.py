"""Real runs, scraped by a real Prometheus: alerts fire on faults, and only then.

The times of the rules are a sixtieth of those that ship. A slow machine only delays
what these tests wait for.
"""

import contextlib
import os
import pathlib
import re
import signal
import time

import pytest

from elastic_ckpt.deploy import alerts, dashboard
from elastic_ckpt.training import run_directory
from tests import process_tree, prometheus_server, runs, shared_memory
from tests.deploy import observed_callbacks

SCALE = 1 / 60
# The longest time that an alert looks back and holds.
LONGEST_SECS = SCALE * max(each.over_secs + each.hold_secs for each in alerts.ALERTS)
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


def steps_of(server, job):
    return server.value(f'max(elastic_ckpt_train_steps{{job="{job}"}})')


def listener(pid, port):
    """The process that listens at a port, of one and all that it has started."""
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    sockets = {
        f"socket:[{row[9]}]"
        for row in rows
        if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A"
    }
    for each in process_tree.of(pid):
        for descriptor in pathlib.Path(f"/proc/{each}/fd").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(descriptor) in sockets:
                    return each
    return None


def kill_host(started, port, *, spoilt=None):
    """Kills the host that serves at a port, once there is one.

    Args:
      started: the run.
      port: of the host.
      spoilt: a directory below which copies of steps are damaged at this moment.
    """
    prometheus_server.until(
        lambda: listener(started.pid, port) is not None, what=f"a host at port {port}"
    )
    host = listener(started.pid, port)
    if host is None:
        return
    others = process_tree.of(started.pid)
    # Nobody saves a step meanwhile.
    process_tree.send(others, signal.SIGSTOP)
    if spoilt is not None:
        spoil(spoilt)
    process_tree.send([host], signal.SIGKILL)
    process_tree.send(others, signal.SIGCONT)


def spoil(root):
    """Flips a bit of each chunk of an array below a RAM disk."""
    for path in pathlib.Path(root).rglob("*"):
        if re.search(r"/hosts/\d+/\d+-.*/c(/\d+)*$", str(path)) and path.is_file():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)


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


@pytest.mark.slow
def test_an_elastic_run_raises_no_alert_but_those_of_its_faults(tmp_path, corpus):
    hosts = 3
    port = prometheus_server.free_ports(hosts + 1)
    with shared_memory.directory("observed") as ram:
        config = runs.write_config(
            tmp_path,
            corpus,
            steps=STEPS,
            hosts=hosts,
            slices=hosts,
            num_logical_shards=6,
            global_batch_size=6,
            elastic_enabled=True,
            elastic_min_slice_count=2,
            elastic_settle_seconds=1,
            elastic_quarantine_failures=3,
            # Hosts that stand still are not ended.
            elastic_heartbeat_timeout_seconds=LONGEST_SECS * 100,
            elastic_hang_timeout_seconds=LONGEST_SECS * 100,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=20,
            multi_tier_checkpointing_backup_interval_steps=40,
            peer_copies=1,
            training_callbacks=observed_callbacks.named(observed_callbacks.paced),
            prometheus_port=port,
        )
        run = tmp_path / "tiny"
        targets = {"tiny": range(port, port + hosts + 1)}
        with training(config) as started:
            prometheus_server.until(
                lambda: run.is_dir() and len(runs.events(run, "backed_up")) > 0,
                what="the first backup",
            )
            with scraped(tmp_path, targets) as server:
                began = time.time()
                fires = fires_of(server)
                prometheus_server.until(
                    lambda: time.time() > began + 1.5 * LONGEST_SECS,
                    what="all alerts could have fired",
                )
                assert server.firing() == set()
                assert steps_of(server, "tiny") > 40

                # A host finds that its own copies are damaged, and reads others.
                kill_host(started, port, spoilt=f"{ram}/slice-0")
                while not fires("RunReadBadCopies", within_secs=30):
                    kill_host(started, port, spoilt=f"{ram}/slice-0")
                # All copies in RAM are damaged.
                kill_host(started, port + 1, spoilt=ram)
                while not fires("RunRestoredFromStorage", within_secs=30):
                    kill_host(started, port + 1, spoilt=ram)
                # A slice that fails again and again is left out, and its port with it.
                while not runs.events(run, "slice_quarantined"):
                    if host := listener(started.pid, port + 2):
                        process_tree.send([host], signal.SIGKILL)
                assert fires("RunTargetDown")
                assert fires("RunLacksSlices")

                with storage_broken(run):
                    assert fires("RunSavesFail")
                    assert fires("RunBackupsBehind")

                hung = process_tree.of(started.pid)
                process_tree.send(hung[1:], signal.SIGSTOP)
                prometheus_server.until(
                    lambda: not server.value(f'up{{instance="127.0.0.1:{port}"}}'),
                    what="a host that hangs is not scraped",
                )
                assert fires("RunMakesNoSteps")
                assert fires("RunGoodputLow")
                process_tree.send(hung[1:], signal.SIGCONT)

                kill(started)
                assert fires("RunEndedEarly")
                unanswered = [
                    title
                    for title, query in dashboard.queries()
                    if not answered(server, query, "tiny", began)
                ]
                assert unanswered == []


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


def answered(server, query, job, began):
    asked = query.replace("$job", job).replace("$__rate_interval", "5s")
    return server.points(asked, start=began, end=time.time(), step=1)


@pytest.mark.night
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
    with scraped(tmp_path, {"tiny": range(port, port + 3)}) as server, training(config):
        fires = fires_of(server)
        assert fires("RunLossNotFinite")
        assert fires("RunDiverged")
        assert fires("RunReplicasDiffer")
        assert fires("RunBlockedBySaves")
        with storage_broken(run):
            assert fires("RunSavesFail")
            assert fires("RunSavesNothing")


@pytest.mark.night
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
