"""Steps in the RAM of hosts, nodes and backup hosts outlive what may be lost.

A world of `tier_worlds` saves and restores steps; the great run is one of pods on nodes
whose agents stay.
"""

import contextlib
import functools
import os
import shutil
import time

import pytest
import trustme

import elastic_ckpt as ec
from elastic_ckpt.tiers.choices import TlsFiles
from elastic_ckpt.tiers.peers import agent
from tests import runs
from tests.processes import (
    backup_hosts,
    claims,
    great_runs,
    outer_launcher,
    tier_worlds,
)
from tests.tiers import served

LIMIT_SECS = 1200


def on(ram, numbers, work, tmp_path, **options):
    """Runs `work` on a host on each of some machines, whose agents are started."""
    if "tls" not in options:
        ram.start_agents(numbers)
    return tier_worlds.run(
        work,
        num_hosts=len(numbers),
        directories=[ram.directory(number) for number in numbers],
        logs=tmp_path / "logs",
        **options,
    )


def saved(steps):
    return functools.partial(tier_worlds.save, steps=steps, sharded=True)


def restored(step):
    return functools.partial(tier_worlds.restore, step=step, sharded=True)


def read_bytes(events):
    """How many bytes were read from how near."""
    (event,) = (each for each in events if each["event"] == "restored_from")
    return {
        near: event[f"{near}_bytes"]
        for near in ("local", "close", "distant", "persistent")
    }


def reasons(events, name):
    return [each["why"] for each in events if each["event"] == name]


def test_hosts_save_and_others_restore_without_a_machine_and_without_a_slice(
    ram, tmp_path
):
    on(ram, range(4), saved([2, 3]), tmp_path, slices=2)
    # The one host of another world, beside idle machines.
    for numbers in ([1], [0, 1, 2, 3]):
        events = on(ram, numbers, restored(3), tmp_path)
        assert not reasons(events, "step_passed_over")
    # Nobody asks another machine for what its own has.
    assert read_bytes(events)["close"] == 0
    # A whole slice, as two hosts.
    ram.lose(2)
    ram.lose(3)
    events = on(ram, range(2), restored(3), tmp_path)
    assert not reasons(events, "step_passed_over")


@pytest.mark.slow
def test_more_than_the_copies_cover_falls_back_to_storage_and_says_why(ram, tmp_path):
    options = {"copies": 1, "slices": 2, "persistent": str(tmp_path / "steps")}
    on(ram, range(4), saved([2, 3]), tmp_path, every=2, **options)
    for number in (0, 2):
        ram.lose(number)
    events = on(ram, [1, 3], restored(2), tmp_path, every=2, **options)
    whys = reasons(events, "step_passed_over")
    # Between the two searches the answers of agents that are gone may differ.
    lacks = "step 3 in local lacks parts of 15 of 28 arrays and files: [state/b["
    assert whys
    assert [why for why in whys if not why.startswith(lacks)] == []
    assert read_bytes(events)["persistent"] > 0


@pytest.mark.slow
def test_assumed_data_parallelism_copies_nothing_and_says_what_that_risks(
    ram, tmp_path
):
    options = {"assume_data_parallelism": True, "slices": 2}
    events = on(ram, range(4), saved([1]), tmp_path, **options)
    # No step is said to be safe.
    assert not [each for each in events if each["event"] == "replicated"]
    assert "parts lack copies: they are on fewer" in " ".join(
        reasons(events, "degraded")
    )


@pytest.mark.slow
def test_a_world_with_tls_saves_and_restores(ram, tmp_path):
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = ca.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "host.pem")
    own = str(tmp_path / "host.pem")
    tls = TlsFiles(certificate=own, key=own, authority=str(tmp_path / "ca.pem"))
    on(ram, range(2), saved([1]), tmp_path, tls=tls, copies=1)
    events = on(ram, [1, 0, 2], restored(1), tmp_path, tls=tls)
    assert read_bytes(events)["close"] > 0


@pytest.mark.slow
def test_a_follower_reads_the_copies_of_agents_that_were_killed(ram, tmp_path):
    steps = str(tmp_path / "steps")
    options = {"slices": 2, "copies": 1, "persistent": steps, "every": 10**6}
    on(ram, range(4), saved([3, 4]), tmp_path, **options)

    def followed():
        secret_file = os.path.join(ram.directory(0), "secret")
        return ec.watch_steps(steps, secret_file=secret_file, timeout_secs=0)

    # What one saw before, and another one that begins now, as agents are killed.
    before = followed()
    assert next(before).step == 4
    ram.stop_agent(0)
    (step,) = followed()
    assert step.step == 4
    tier_worlds.check(step.load(), 4)
    ram.stop_agent(1)
    assert list(before) == []
    # Of each slice a part is lost, whichever step it is of.
    ram.stop_agent(2)
    assert list(followed()) == []


def lose_pods_then_nodes(run):
    """All pods are replaced while their nodes stay; then the nodes are lost, too."""
    secret_file = run.directory / "secret"
    secret_file.write_text("the-secret-of-this-run\n")
    secret = ("--secret-file", secret_file)
    nodes = [os.path.join(run.ram, name) for name in ("a", "b", "c")]
    for node in nodes:
        os.mkdir(node)
    with contextlib.ExitStack() as stack:
        backup = stack.enter_context(
            backup_hosts.BackupHost(
                f"{run.ram}/backup",
                steps=run.path / "checkpoints",
                secret_file=secret_file,
            )
        )
        run.backup_settings = (
            f"peer_secret_file={secret_file}",
            f"peer_backup_urls={backup.url}",
        )
        with contextlib.ExitStack() as agents:
            for node in nodes[:2]:
                name = f"rack=r-{os.path.basename(node)};zone=z"
                node_agent = served.agent_process(
                    node, "--node", "--domains", name, *secret
                )
                agents.enter_context(node_agent)
            run.first = kill_after(run, nodes[:2], saves=3)
            run.agents = [agent.find(os.path.join(node, "tiny")) for node in nodes[:2]]
            run.stored = runs.saved_steps(run.path)
            # The only pod reads the rest from the idle node's memory.
            fetched = functools.partial(backup.await_copied, after=run.first)
            run.second = kill_after(run, nodes[:1], saves=2, then=fetched)
            assert run.agents[0] == agent.find(os.path.join(nodes[0], "tiny"))
        for node in nodes[:2]:
            shutil.rmtree(node)
        # A leader that was killed may have saved one more than it told.
        last = backup.newest() + 4
        with pods(run, nodes[2:], f"steps={last}") as tasks:
            (output,) = outer_launcher.outputs(tasks)
        assert tasks[0].returncode == 0, output


@contextlib.contextmanager
def pods(run, nodes, *settings):
    """Starts a world with a pod for each node, which mounts its directory."""
    with outer_launcher.tasks(
        run.config,
        *(*run.backup_settings, *settings),
        num_tasks=len(nodes),
        of_task=lambda number: [f"local_checkpoint_directory={nodes[number]}"],
    ) as tasks:
        yield tasks


def kill_after(run, nodes, *, saves, then=lambda: None):
    """Runs a world until it has saved some steps, and kills all of its pods.

    Returns:
      What `then` returns before that, or the last step that was saved.
    """
    before = len(run.events("saved")) if (run.path / "events.jsonl").exists() else 0
    deadline = time.monotonic() + LIMIT_SECS
    with pods(run, nodes) as tasks:
        while (
            not (run.path / "events.jsonl").exists()
            or len(runs.events(run.path, "saved")) < before + saves
        ):
            assert all(task.poll() is None for task in tasks), tasks[0].stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        last = then()
    return last or max(each["step"] for each in run.events("saved"))


@pytest.mark.slow
class TestMemory(claims.Claims):
    scenario = great_runs.Scenario(
        drive=lose_pods_then_nodes,
        # One of the world may be alone.
        slices=1,
        settings={
            "elastic_enabled": False,
            "local_checkpoint_period": 4,
            # Each training host keeps its copy alone, and storage has nothing.
            "peer_copies": 0,
        },
    )

    def test_each_world_restores_from_what_is_left(self, run):
        of_nodes, of_backup = run.events("restored_from")
        assert of_nodes["step"] >= run.first
        assert of_nodes["close_bytes"] + of_nodes["distant_bytes"] > 0
        assert of_backup["step"] >= run.second
        assert of_backup["local_bytes"] == 0
        assert run.stored == []
