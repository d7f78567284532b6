"""Pods come and go, and their steps stay in the memory of the nodes.

An agent of a node is a process with a directory in /dev/shm, and a pod is a process
group that mounts it.
"""

import contextlib
import os
import time

import pytest

from elastic_ckpt.tiers.peers import agent, node_record
from elastic_ckpt.tiers.ram import ram_disk
from tests import runs, shared_memory
from tests.multiprocess import outer_launcher
from tests.tiers import served

NODES = ("a", "b")
LIMIT_SECS = 1200


@pytest.fixture
def nodes():
    """The directory of each node, with its agent."""
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(shared_memory.directory("nodes"))
        directories = [os.path.join(base, name) for name in NODES]
        for name, directory in zip(NODES, directories, strict=True):
            os.mkdir(directory)
            arguments = ("--node", "--domains", f"rack=r-{name};zone=z")
            started = served.agent_process(directory, *arguments)
            stack.enter_context(started)
        yield directories


@contextlib.contextmanager
def pods(config, directories, *settings):
    """Starts a world with a pod for each directory, that of its node."""

    def of_task(number):
        return [f"local_checkpoint_directory={directories[number]}"]

    with outer_launcher.tasks(
        config, *settings, num_tasks=len(directories), of_task=of_task
    ) as tasks:
        yield tasks


def kill_after(config, run, directories, count, *, event="saved"):
    """Runs a world until it has `count` more events, and kills all of its pods.

    Returns:
      The last step of such an event.
    """

    def happened():
        return len(runs.events(run, event))

    events = run / "events.jsonl"
    before = happened() if events.exists() else 0
    deadline = time.monotonic() + LIMIT_SECS
    # At the end of the block every process group gets SIGKILL.
    with pods(config, directories, "steps=1000000") as tasks:
        while not events.exists() or happened() < before + count:
            ended = [task for task in tasks if task.poll() is not None]
            assert not ended, ended[0].communicate()
            assert time.monotonic() < deadline, events.read_text()
            time.sleep(0.02)
    return max(each["step"] for each in runs.events(run, event))


def addresses(nodes):
    return [agent.find(os.path.join(node, "tiny")) for node in nodes]


@pytest.mark.slow
def test_pods_that_replace_all_others_restore_from_the_memory_of_the_nodes(
    tmp_path, corpus, nodes
):
    config = runs.write_config(
        tmp_path,
        corpus,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_period=2,
        # Storage has nothing before the end of the run.
        multi_tier_checkpointing_backup_interval_steps=1000,
        # Each node holds a part of every step.
        peer_copies=0,
        grain_use_elastic_iterator=True,
    )
    run = tmp_path / "tiny"
    first = kill_after(config, run, [*nodes, *nodes], 3)
    served_at = addresses(nodes)
    assert [node_record.read(node).agents["tiny"] for node in nodes] == served_at
    for node, name in zip(nodes, NODES, strict=True):
        disk = ram_disk.RamDisk(os.path.join(node, "tiny"), run="tiny")
        hosts = [
            offer.manifest.host
            for step in disk.steps()
            for offer in disk.offers(step).sources
        ]
        assert {host.domains["rack"] for host in hosts} == {f"r-{name}"}
    assert not (run / "checkpoints").exists() or not runs.saved_steps(run)
    # The next world has half of the hosts, one on each node.
    second = kill_after(config, run, nodes, 2)
    (restored,) = runs.events(run, "restored_from")
    assert restored["step"] >= first
    assert restored["persistent_bytes"] == 0
    assert restored["bad_copies"] == 0
    # The last one is on one node, and reads the rest from the idle node's memory.
    with pods(config, nodes[:1], f"steps={second + 4}") as tasks:
        stdout, stderr = tasks[0].communicate(timeout=LIMIT_SECS)
        assert tasks[0].returncode == 0, stdout + stderr
    restored = runs.events(run, "restored_from")[-1]
    assert restored["step"] >= second
    assert restored["persistent_bytes"] == 0
    assert restored["close_bytes"] + restored["distant_bytes"] > 0
    # All the while the agents were the same.
    assert addresses(nodes) == served_at
    assert "PASSED" in runs.verb("audit", run)
