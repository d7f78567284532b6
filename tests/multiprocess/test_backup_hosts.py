"""All training hosts are lost with their RAM, and backup hosts have their step."""

import contextlib
import os
import shutil
import subprocess

import pytest

from tests import runs, shared_memory
from tests.multiprocess import test_node_agents

MACHINES = ("a", "b")


@contextlib.contextmanager
def backup_hosts(directories, secret_file):
    """Starts a backup host for each directory; yields their addresses."""
    with contextlib.ExitStack() as stack:
        urls = []
        for directory in directories:
            arguments = (directory, "--backup", "--secret-file", secret_file)
            started = stack.enter_context(
                subprocess.Popen(
                    runs.command("agent", *arguments),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(started.terminate)
            line = started.stdout.readline()
            assert line.startswith(f"serving {directory} at ")
            urls.append(line.split()[-1])
            # Its further output fits into the pipe.
        yield urls


@pytest.mark.slow(minutes=1)
def test_all_training_hosts_are_lost_with_their_ram_and_nothing_is_read_from_storage(
    tmp_path, corpus
):
    secret_file = tmp_path / "secret"
    secret_file.write_text("the-secret-of-this-run\n")
    run = tmp_path / "tiny"
    with shared_memory.directory("backup") as base:
        machines = [os.path.join(base, name) for name in MACHINES]
        backups = [os.path.join(base, f"backup-{number}") for number in range(2)]
        with backup_hosts(backups, secret_file) as urls:
            config = runs.write_config(
                tmp_path,
                corpus,
                enable_multi_tier_checkpointing=True,
                local_checkpoint_period=2,
                # Storage has nothing before the end of the run.
                multi_tier_checkpointing_backup_interval_steps=1000,
                # Each training host keeps its copy alone.
                peer_copies=0,
                peer_backup_urls=";".join(urls),
                peer_secret_file=str(secret_file),
                grain_use_elastic_iterator=True,
            )
            first = test_node_agents.kill_after(
                config, run, machines, 2, event="replicated"
            )
            # Tiny steps are faster than copies of them, and nothing else is wrong.
            degraded = {each["why"] for each in runs.events(run, "degraded")}
            assert all(why.startswith("copies of an earlier") for why in degraded)
            for machine in machines:
                shutil.rmtree(machine)
            with test_node_agents.pods(config, machines, f"steps={first + 6}") as tasks:
                limit_secs = test_node_agents.LIMIT_SECS
                outputs = [task.communicate(timeout=limit_secs) for task in tasks]
                assert [task.returncode for task in tasks] == [0, 0], outputs
    (restored,) = runs.events(run, "restored_from")
    assert restored["step"] >= first
    assert restored["persistent_bytes"] == 0
    assert restored["local_bytes"] == 0
    assert restored["close_bytes"] + restored["distant_bytes"] > 0
    assert "PASSED" in runs.verb("audit", run)
