import contextlib
import os
import shutil
import time
from typing import ClassVar

import pytest

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import (
    agent,
    agent_process,
    node_agent,
    node_record,
    node_runs,
    peer_client,
    protocol,
    secret,
)
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served, served_nodes
from tests.tiers.scripted_peer import ScriptedPeer, answer
from tests.tiers.served_nodes import PART

LIMIT_SECS = 600


@contextlib.contextmanager
def attached(root, **options):
    """The address of the agent that serves a program, which may start one."""
    with contextlib.closing(
        agent_process.AgentProcess(agent.Service(root=str(root)), **options)
    ) as process:
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


@pytest.mark.parametrize("path", ["run", "slice-3/run"])
def test_programs_attach_to_the_agent_of_their_node(tmp_path, path):
    with served_nodes.serving(tmp_path):
        root = served_nodes.save_run(tmp_path, path)
        for _ in range(2):
            with attached(root) as url:
                assert agent.wait_for(root).url == url
                # Its agent answers a moment before the record of the node has it.
                until(lambda: path in node_record.find(root).agents)
                assert node_record.find(root).agents[path].url == url
                known = secret.read_or_create(root)
                assert served.ask(url, PART, known) == (200, b"part")
        # Another program has ended, and the agent serves a later one's secret.
        secret.adopt(root, "the-secret-of-a-later-world")
        later = served.ask(url, PART, "the-secret-of-a-later-world")
        assert later == (200, b"part")
        assert served.ask(url, PART, known)[0] == 401


def test_a_new_agent_has_the_addresses_of_the_one_before(tmp_path):
    roots = [served_nodes.save_run(tmp_path, name) for name in ("a", "b")]
    urls = []
    for _ in range(2):
        with served_nodes.serving(tmp_path):
            urls.append([agent.wait_for(root).url for root in roots])
            secrets = [secret.read_or_create(root) for root in roots]
            # The secret of each run opens no other.
            for one, url in enumerate(urls[-1]):
                for other, known in enumerate(secrets):
                    status = 200 if one == other else 401
                    assert served.ask(url, PART, known)[0] == status
        assert node_record.find(roots[0]) is None
    assert urls[0] == urls[1]


def test_without_the_agent_of_its_node_a_program_starts_one_that_is_replaced_later(
    tmp_path,
):
    root = served_nodes.save_run(tmp_path)
    with (
        attached(root) as started,
        served_nodes.serving(tmp_path),
        attached(root) as again,
    ):
        assert again == started
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
        until(lambda: agent.wait_for(root).machine == "f" * machine.ID_LENGTH)
        known = secret.read_or_create(root)
        assert served.ask(agent.wait_for(root).url, PART, known)[0] == 200


def test_two_agents_of_one_node_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(node_agent, "_LOCK_SECS", 0)
    with (
        served_nodes.serving(tmp_path),
        pytest.raises(errors.RunError, match="another agent serves the runs"),
        served_nodes.serving(tmp_path),
    ):
        pass


def test_directories_that_are_no_runs_are_not_served(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    root = served_nodes.save_run(tmp_path)
    with served_nodes.serving(tmp_path):
        agent.wait_for(root)
        until(lambda: node_record.read(str(tmp_path)).agents)
        assert list(node_record.read(str(tmp_path)).agents) == ["run"]
        remove(root)
        until(lambda: not node_record.read(str(tmp_path)).agents)


def test_a_program_and_an_agent_of_other_versions_are_one_error_that_names_both(
    tmp_path,
):
    assert protocol.problem(str(protocol.VERSION)) is None
    for version in ("0", "2", "1.1", "x", ""):
        assert f"version {version} of" in protocol.problem(version)
    root = served_nodes.save_run(tmp_path)
    too_new = protocol.VERSION + 1
    with served.serving(agent.Service(root=str(root))) as address:
        header = f"{protocol.HEADER}: {too_new}"
        known = secret.read_or_create(root)
        assert served.ask(address.url, PART, known, header)[0] == 426
    respond = lambda connection, _: connection.sendall(  # noqa: E731
        answer(b"part", headers=[header])
    )
    with (
        contextlib.closing(peer_client.PeerClient(known)) as client,
        ScriptedPeer(respond) as peer,
        pytest.raises(source.ReadError, match=f"speaks version {too_new}"),
    ):
        client.endpoint(peer.url).read(PART, most_bytes=9)


class TestRunsThatEnded:
    def test_they_are_removed_after_a_while(self, tmp_path):
        root = served_nodes.save_run(tmp_path)
        lifetime = node_runs.Lifetime(unused_secs=0.5)
        with served_nodes.serving(
            tmp_path, lifetime=lifetime, sweep_secs=0.05
        ) as lines:
            until(lambda: not root.exists())
            until(lambda: not node_record.read(str(tmp_path)).agents)
        assert [line for line in lines if line.startswith("removed run")]
        assert sorted(os.listdir(tmp_path)) == ["node.json", "node.lock"]

    def test_a_run_that_a_process_has_is_not_removed(self, tmp_path):
        root = served_nodes.save_run(tmp_path)
        with storage.exclusive_lock(root / "hosts" / "0" / "lock"):
            assert node_runs.unused_secs(str(root)) == 0
            assert not node_runs.remove(str(root))
        assert (root / "hosts" / "0" / "30-0").is_dir()
        assert node_runs.remove(str(root))
        assert os.listdir(tmp_path) == []

    def test_a_removal_that_was_cut_short_is_finished(self, tmp_path):
        served_nodes.save_run(tmp_path, ".removed-run")
        served_nodes.save_run(tmp_path, "slice-1/.removed-run")
        kept = served_nodes.save_run(tmp_path, "slice-1/run")
        node_runs.remove_leftovers(str(tmp_path))
        assert os.listdir(tmp_path) == ["slice-1"]
        assert list((tmp_path / "slice-1").iterdir()) == [kept]

    def test_the_limit_removes_those_that_were_unused_the_longest(self):
        uses = {
            path: node_runs.Use(unused_secs=secs, num_bytes=10)
            for path, secs in {"a": 5000.0, "b": 900.0, "c": 30.0}.items()
        }
        for limit_bytes, removed in ((None, "a"), (30, "a"), (19, "ab"), (0, "ab")):
            lifetime = node_runs.Lifetime(unused_secs=3600, limit_bytes=limit_bytes)
            assert node_runs.to_remove(uses, lifetime) == list(removed)


class TestRoomForRuns:
    LIFETIME = node_runs.Lifetime(limit_bytes=100, least_unused_secs=60)
    OTHERS: ClassVar = {
        "live": node_runs.Use(unused_secs=0, num_bytes=10, granted_bytes=30),
        "new": node_runs.Use(unused_secs=59, num_bytes=10, granted_bytes=90),
        "old": node_runs.Use(unused_secs=61, num_bytes=20, granted_bytes=90),
        "older": node_runs.Use(unused_secs=99, num_bytes=20),
    }

    def test_runs_that_ended_make_room_oldest_first(self):
        for num_bytes, removed in (
            (20, []),
            (21, ["older"]),
            (40, ["older"]),
            (60, ["older", "old"]),
        ):
            to_remove = node_runs.to_remove(
                self.OTHERS, self.LIFETIME, needed_bytes=num_bytes
            )
            assert to_remove == removed
            staying = {path: self.OTHERS[path] for path in {*self.OTHERS} - {*removed}}
            node_runs.check_room("run", num_bytes, staying, self.LIFETIME)

    def test_live_runs_stay_and_the_error_has_the_figures(self):
        live = {path: self.OTHERS[path] for path in ("live", "new")}
        assert not {*live} & {
            *node_runs.to_remove(self.OTHERS, self.LIFETIME, needed_bytes=61)
        }
        with pytest.raises(errors.RunError) as raised:
            node_runs.check_room("run", 61, live, self.LIFETIME)
        message = str(raised.value)
        assert message.startswith(
            "run run needs 61 bytes of this node's memory, but only 60 of 100 are"
        )
        assert "live 30 bytes (in use), new 10 bytes (unused for 59 s)" in message

    def test_a_run_that_starts_has_those_that_ended_removed(self, tmp_path):
        limit_bytes = 2**20
        lifetime = node_runs.Lifetime(limit_bytes=limit_bytes, least_unused_secs=0)
        ended, live, run = (
            served_nodes.save_run(tmp_path, name) for name in ("ended", "live", "run")
        )
        with (
            served_nodes.serving(tmp_path, lifetime=lifetime),
            storage.exclusive_lock(live / "hosts" / "0" / "lock"),
        ):
            with attached(run, most_bytes=limit_bytes // 2) as url:
                assert url == agent.wait_for(run).url
            assert ended.exists()
            refused = "run run needs 1048576 bytes.*live [0-9]+ bytes .in use"
            with (
                pytest.raises(errors.RunError, match=refused),
                attached(run, most_bytes=limit_bytes),
            ):
                pass
            assert ended.exists()
            fits = limit_bytes - ram_disk.used_bytes(str(live)) - 1
            with attached(run, most_bytes=fits):
                assert live.exists()
                assert not ended.exists()
