"""The agent of a node serves runs that come and go, and removes those that ended."""

import contextlib
import functools
import os
import shutil
import time

import pytest

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import agent, agent_server, secret
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served, served_nodes
from tests.tiers.served_nodes import PART

LIMIT_SECS = 600


@contextlib.contextmanager
def attached(root):
    """The URL of the agent that serves a program, which may start one."""
    process = agent.AgentProcess(agent.Service(root=str(root)))
    with contextlib.closing(process):
        yield process.address.url


def remove(root):
    # At once: the agent removes its files, too.
    gone = root.rename(root.with_name(".gone"))
    shutil.rmtree(gone)


def until(condition):
    deadline = time.monotonic() + LIMIT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["run", "slice-3/run", "an odd%2Fname"])
def test_programs_attach_to_the_agent_of_their_node(tmp_path, path):
    with served_nodes.serving(tmp_path, domains={"rack": "r7"}):
        root = served_nodes.save_run(tmp_path, path)
        for _ in range(2):
            with attached(root) as url:
                assert agent.wait_for(root).url == url
                assert agent.domains(root) == {"rack": "r7"}
                known = secret.read_or_create(root)
                assert served.ask(url, PART, known) == (200, b"part")
        # Another program has ended, and the agent serves a later one's secret.
        secret.adopt(root, "the-secret-of-a-later-world")
        later = served.ask(url, PART, "the-secret-of-a-later-world")
        assert later == (200, b"part")
        assert served.ask(url, PART, known)[0] == 401
    assert agent.find(root) is None
    assert agent.domains(root) == {}


def test_the_secret_of_each_run_opens_no_other(tmp_path):
    roots = [served_nodes.save_run(tmp_path, name) for name in ("a", "b")]
    told = served_nodes.save_run(tmp_path, "c")
    known = secret.read_or_create(told)
    (told / "secret").chmod(0o644)
    with served_nodes.serving(tmp_path):
        urls = [agent.wait_for(root).url for root in roots]
        # Others may know it.
        assert served.ask(urls[0].replace("/v1/a", "/v1/c"), PART, known)[0] == 401
        secrets = [secret.read_or_create(root) for root in roots]
        for one, url in enumerate(urls):
            for other, known in enumerate(secrets):
                status = 200 if one == other else 401
                assert served.ask(url, PART, known)[0] == status


def test_without_the_agent_of_its_node_a_program_starts_one_that_is_replaced_later(
    tmp_path,
):
    root = served_nodes.save_run(tmp_path)
    with attached(root) as started, contextlib.ExitStack() as stack:
        own = agent.find(root)
        stack.enter_context(served_nodes.serving(tmp_path))
        until(lambda: (agent.find(root) or own) != own)
        known = secret.read_or_create(root)
        for url in (started, agent.find(root).url):
            assert served.ask(url, PART, known)[0] == 200
    # What an agent that was killed has left is not taken for an address.
    stale = agent.Address(url=started, pid=1, machine=served.MACHINE)
    agent.publish(root, stale)
    with served_nodes.serving(tmp_path), attached(root) as again:
        assert again == agent.wait_for(root).url
        assert again != started


def test_a_directory_that_takes_the_place_of_another_is_served_in_its_turn(tmp_path):
    with served_nodes.serving(tmp_path):
        root = served_nodes.save_run(tmp_path)
        agent.wait_for(root)
        remove(root)
        served_nodes.save_run(tmp_path)
        (root / machine.FILE).write_text("f" * machine.ID_LENGTH)
        assert agent.wait_for(root).machine == "f" * machine.ID_LENGTH
        known = secret.read_or_create(root)
        assert served.ask(agent.wait_for(root).url, PART, known)[0] == 200


def test_two_agents_of_one_node_are_an_error(tmp_path):
    with (
        served_nodes.serving(tmp_path),
        pytest.raises(errors.RunError, match="another agent serves"),
        served_nodes.serving(tmp_path),
    ):
        pass


def test_directories_that_are_no_runs_are_not_served(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    served_nodes.save_run(tmp_path, ".removed-run")
    root = served_nodes.save_run(tmp_path)
    assert agent_server.runs(str(tmp_path)) == {"run": str(root)}


class TestRunsThatEnded:
    def test_they_are_removed_after_a_while(self, tmp_path):
        root = served_nodes.save_run(tmp_path)
        # A removal that a crash cut short.
        served_nodes.save_run(tmp_path, "slice-1/.removed-run")
        with served_nodes.serving(tmp_path, unused_after=0.5, sweep_secs=0.05) as lines:
            until(lambda: not root.exists())
        assert [line for line in lines if line.startswith("removed run")]
        assert sorted(os.listdir(tmp_path)) == ["agent.lock", "slice-1"]
        assert os.listdir(tmp_path / "slice-1") == []

    def test_a_run_that_a_process_has_or_had_a_moment_ago_is_not_removed(
        self, tmp_path
    ):
        root = served_nodes.save_run(tmp_path)
        sweep = functools.partial(agent_server.sweep, str(tmp_path))
        os.utime(root, (0, 0))
        with storage.exclusive_lock(root / "hosts" / "0" / "lock"):
            for secs in (3600, -1):
                assert sweep(unused_after=secs) == []
        assert sweep(unused_after=3600) == []
        os.utime(root, (0, 0))
        assert sweep(unused_after=3600) == ["run"]
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("limit", "removed"), [(3, []), (2, ["a"]), (1, ["a", "b"]), (0, ["a", "b"])]
    )
    def test_the_limit_removes_those_that_were_unused_the_longest(
        self, tmp_path, limit, removed
    ):
        for name, secs in (("a", 5000), ("b", 900), ("c", 30)):
            root = served_nodes.save_run(tmp_path, name)
            used = time.time() - secs
            os.utime(root, (used, used))
        num_bytes = ram_disk.used_bytes(str(root))
        swept = agent_server.sweep(str(tmp_path), max_bytes=limit * num_bytes)
        assert swept == removed
