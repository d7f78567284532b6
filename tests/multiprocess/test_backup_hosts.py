"""All training hosts are lost with their RAM, and backup hosts have their step."""

import contextlib
import os
import pathlib
import shutil
import time

import pytest
import trustme

from elastic_ckpt.tiers.choices import TlsFiles
from tests import runs, shared_memory
from tests.multiprocess import backup_hosts, machines, test_node_agents
from tests.multiprocess.test_elastic_ram import on, restored, saved

MACHINES = ("a", "b")


def of_backup(secret_file):
    return ("--backup", "--secret-file", secret_file)


class BackedUpRun:
    """A run with backup hosts; the directory of each of its machines is in `machines`.

    Args:
      directory: for the run.
      corpus: its data.
      ram: the RAM disk of all machines.
      stack: ends the backup hosts.
    """

    def __init__(self, directory, corpus, ram, stack):
        secret_file = directory / "secret"
        secret_file.write_text("the-secret-of-this-run\n")
        self.run = directory / "tiny"
        self.machines = [os.path.join(ram, name) for name in MACHINES]
        self.backups = [
            stack.enter_context(
                backup_hosts.BackupHost(
                    os.path.join(ram, f"backup-{n}"), *of_backup(secret_file)
                )
            )
            for n in range(2)
        ]
        self.config = runs.write_config(
            directory,
            corpus,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_period=2,
            # Each training host keeps its copy alone.
            peer_copies=0,
            peer_backup_urls=";".join(each.url for each in self.backups),
            peer_secret_file=str(secret_file),
            grain_use_elastic_iterator=True,
            # Storage has nothing before the end of the run.
            multi_tier_checkpointing_backup_interval_steps=1000,
        )

    def lose_training_hosts(self):
        for machine in self.machines:
            shutil.rmtree(machine)

    def restored(self, steps):
        """Ends the run on new machines after `steps`; returns what it has restored."""
        limit_secs = test_node_agents.LIMIT_SECS
        with test_node_agents.pods(
            self.config, self.machines, f"steps={steps}"
        ) as tasks:
            outputs = [task.communicate(timeout=limit_secs) for task in tasks]
            assert [task.returncode for task in tasks] == [0, 0], outputs
        return runs.events(self.run, "restored_from")[-1]

    def await_outage(self, backup, *, after):
        """Waits until the run has reported a backup host at a step after `after`."""
        deadline = time.monotonic() + backup_hosts.WAIT_SECS
        while not any(
            backup.url in each["why"] and each["step"] > after
            for each in runs.events(self.run, "degraded")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def started(tmp_path, corpus):
    with (
        shared_memory.directory("backup") as ram,
        contextlib.ExitStack() as stack,
    ):
        yield BackedUpRun(tmp_path, corpus, ram, stack)


@pytest.mark.slow
def test_after_the_loss_of_all_training_hosts_backup_hosts_have_the_step(
    started,
):
    lost, other = started.backups
    with test_node_agents.pods(started.config, started.machines, "steps=1000000"):
        step, share = lost.await_fetched()
        whole = share + other.await_fetched(step=step)[1]
        assert share < whole
        before = max(lost.fetched())
        lost.kill()
        # The run goes on, and the other one takes everything.
        other.await_fetched(after=max(other.fetched()), num_parts=whole)
        started.await_outage(lost, after=before)
        lost.start_again(is_empty=True)
        step, share = lost.await_fetched()
        rest = other.await_fetched(step=step)[1]
        assert share + rest == whole
        assert share < whole
    started.lose_training_hosts()
    last = max(each["step"] for each in runs.events(started.run, "saved"))
    restored = started.restored(last + 6)
    assert restored["step"] >= step
    assert restored["persistent_bytes"] == restored["local_bytes"] == 0
    assert restored["close_bytes"] + restored["distant_bytes"] > 0
    assert "PASSED" in runs.verb("audit", started.run)


def state_files(backup):
    """The files of the state on a backup host, with their content."""
    return {
        path: path.read_bytes()
        for path in pathlib.Path(backup.directory).glob("hosts/0/4-*/state/**/*")
        if path.is_file() and path.suffix != ".json"
    }


def flip_a_byte_of_each(files):
    for path, content in files.items():
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.slow
def test_bad_copies_on_a_live_backup_host_are_put_right_also_with_tls(tmp_path):
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    # Hosts announce their certificates, and backup hosts are known by their names.
    for name in ("127.0.0.1", "host.example"):
        issued = ca.issue_cert(name)
        path = tmp_path / f"{name}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(path)
    secret_file, steps = tmp_path / "secret", tmp_path / "steps"
    secret_file.write_text("the-secret-of-this-run\n")
    authority, of_host = str(tmp_path / "ca.pem"), str(tmp_path / "host.example.pem")
    certificate = tmp_path / "127.0.0.1.pem"
    options = ("--tls-certificate", certificate, "--tls-key", certificate)
    with (
        machines.Machines() as ram,
        backup_hosts.BackupHost(
            ram.directory(9), *of_backup(secret_file), *options, "--tls-ca", authority
        ) as backup,
    ):
        world = {
            "tls": TlsFiles(certificate=of_host, key=of_host, authority=authority),
            "copies": 0,
            "backups": (backup.url,),
            "secret_file": str(secret_file),
            "persistent": str(steps),
        }
        events = on(ram, range(2), saved([4], sharded=True), tmp_path, **world)
        assert not [each for each in events if each["event"] == "degraded"]
        good = state_files(backup)
        flip_a_byte_of_each(good)
        for number in range(2):
            ram.lose(number)
        # Other machines read the copies, which are bad, and then those in storage.
        events = on(ram, [2], restored(4, sharded=True), tmp_path, **world)
        (event,) = (each for each in events if each["event"] == "restored_from")
        assert event["bad_copies"] == event["repaired"] == len(good)
        assert state_files(backup) == good
        flip_a_byte_of_each(good)
        peer = ("--peer", backup.url, "--secret-file", secret_file)
        runs.verb(
            *("verify", "--repair", steps, *peer, "--tls-authority", authority),
            *("--run", "run"),
        )
        assert state_files(backup) == good
