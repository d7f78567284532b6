"""The agent of a node serves runs that come and go, and removes those that ended."""

import contextlib
import http.server
import json
import os
import ssl
import time
from concurrent import futures

import pytest
import trustme

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.peers import agent, agent_server, secret
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served
from tests.tiers.served import PART

TOKEN = "the-token-of-the-account"
LABELS = {
    "topology.kubernetes.io/region": "us-east5",
    "topology.kubernetes.io/zone": "us-east5-a",
    "cloud.google.com/gce-topology-subblock": "s4",
    "example.com/row": "row-2",
}


@contextlib.contextmanager
def attached(root):
    """The URL of the agent that serves a program, which may start one."""
    process = agent.AgentProcess(agent.Service(root=str(root)))
    with contextlib.closing(process):
        yield process.address.url


def status(root, url, known=None):
    """Of the answer to a request, by default with the run's secret."""
    return served.ask(url, PART, known or secret.read_or_create(root))[0]


def test_programs_attach_to_their_node_and_secrets_open_one_run(tmp_path):
    told = served.save_run(tmp_path, "told")
    known = secret.read_or_create(told)
    (told / "secret").chmod(0o644)
    with served.serving_node(tmp_path, domains={"rack": "r7"}):
        refused = pytest.raises(errors.RunError, match="another agent serves")
        with refused, served.serving_node(tmp_path):
            pass
        paths = ("run", "slice-3/run", "an odd%2Fname")
        roots = [served.save_run(tmp_path, path) for path in paths]
        for root in 2 * roots:
            with attached(root) as url:
                assert agent.wait_for(root).url == url
                assert agent.domains(root) == {"rack": "r7"}
                for known_url in (url, "http://[fd00::7]:8470/v1/run"):
                    choices.Peers(known=(known_url,))
                for other in roots:
                    there = status(other, url)
                    assert there == (200 if other == root else 401)
        # A program has ended, and the agent serves a later one's secret.
        former = secret.read_or_create(root)
        secret.adopt(root, "the-secret-of-a-later-world")
        assert (status(root, url), status(root, url, former)) == (200, 401)
        # Others may know this one.
        above = url.rpartition("/")[0]
        assert status(told, f"{above}/told", known) == 401
        # Another directory takes its place at once, as the agent removes files, too.
        storage.remove(root.rename(tmp_path / ".gone"))
        served.save_run(tmp_path, root.name)
        (root / machine.FILE).write_text("f" * machine.ID_LENGTH)
        address = agent.wait_for(root)
        assert address.machine == "f" * machine.ID_LENGTH
        assert status(root, address.url) == 200
    assert agent.find(root) is None
    assert agent.domains(root) == {}


def test_a_node_replaces_the_agent_that_a_program_started(tmp_path):
    root = served.save_run(tmp_path)
    # What an agent that was killed has left is not taken for an address.
    stale = agent.Address(url="http://stale/v1/run", pid=1, machine=served.MACHINE)
    agent.publish(root, stale)
    with attached(root) as started:
        own = agent.find(root)
        assert own.url == started != stale.url
        with served.serving_node(tmp_path):
            served.until(lambda: (agent.find(root) or own) != own)
            assert status(root, started) == status(root, agent.find(root).url) == 200
    agent.publish(root, stale)
    with served.serving_node(tmp_path), attached(root) as again:
        assert again == agent.wait_for(root).url != stale.url
    # The agent of another run serves its own directory alone.
    inside = served.save_run(root)
    with attached(root) as url, attached(inside) as other:
        assert (status(root, url), status(inside, other)) == (200, 200)


def test_runs_that_ended_are_removed_after_a_while(tmp_path):
    root = served.save_run(tmp_path)
    # A removal that a crash cut short.
    served.save_run(tmp_path, "slice-1/.removed-run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    assert agent_server.runs(str(tmp_path)) == {"run": str(root)}
    with served.serving_node(tmp_path, unused_after=0.5, sweep_secs=0.05) as lines:
        served.until(lambda: not root.exists())
    assert [line for line in lines if line.startswith("removed run")]
    left = {"agent.lock", "elsewhere", "notes", "slice-1"}
    assert set(os.listdir(tmp_path)) == left
    assert os.listdir(tmp_path / "slice-1") == []


def test_a_run_in_use_stays_and_the_longest_unused_goes_first(tmp_path):
    def sweep(**options):
        return agent_server.sweep(str(tmp_path), **options)

    root = served.save_run(tmp_path)
    os.utime(root, (0, 0))
    with storage.exclusive_lock(root / "hosts" / "0" / "lock"):
        assert sweep(unused_after=3600) == sweep(unused_after=-1) == []
    # A process had it a moment ago.
    assert sweep(unused_after=3600) == []
    os.utime(root, (0, 0))
    assert sweep(unused_after=3600) == ["run"]
    assert os.listdir(tmp_path) == []
    for limit, removed in ((3, []), (2, ["a"]), (1, ["a", "b"]), (0, ["a", "b"])):
        for name, secs in (("a", 5000), ("b", 900), ("c", 30)):
            root = served.save_run(tmp_path, name)
            used = time.time() - secs
            os.utime(root, (used, used))
        assert sweep(max_bytes=limit * ram_disk.used_bytes(str(root))) == removed


class Api(http.server.BaseHTTPRequestHandler):
    """The Kubernetes API, with one node."""

    def do_GET(self):
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        is_node = self.path == "/api/v1/nodes/node-7"
        self.send_response(200 if allowed and is_node else 404 if allowed else 403)
        self.end_headers()
        self.wfile.write(json.dumps({"metadata": {"labels": LABELS}}).encode())


def test_labels_of_a_node_are_read_or_the_remedy_is_told(tmp_path, monkeypatch):
    def labels_of(node, token=TOKEN):
        (tmp_path / "token").write_text(f"{token}\n")
        return agent_server.read_labels(node, account_directory=str(tmp_path))

    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with (
        http.server.HTTPServer(("127.0.0.1", 0), Api) as api,
        futures.ThreadPoolExecutor(1) as executor,
        contextlib.ExitStack() as stack,
    ):
        api.socket = tls.wrap_socket(api.socket, server_side=True)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_port))
        executor.submit(api.serve_forever, 0.01)
        stack.callback(api.shutdown)
        assert labels_of("node-7") == LABELS
        for node in ("node-8", "../secrets", "node-7/status"):
            with pytest.raises(errors.RunError, match="verb get on nodes"):
                labels_of(node)
        with pytest.raises(errors.RunError, match="403") as error:
            labels_of("node-7", "another-token")
        assert "another-token" not in str(error.value)


def test_labels_name_the_domains_that_nobody_else_has_named(monkeypatch):
    monkeypatch.setattr(agent_server, "read_labels", lambda _: LABELS)
    further = {"rack": "example.com/row", "block": "example.com/none"}
    known = {"region": "us-east5", "zone": "us-east5-a", "rack": "s4"}
    domains = agent_server.node_domains
    assert domains({}, "node-7", {}) == known
    named = {**known, "zone": "z", "rack": "row-2"}
    assert domains({"zone": "z"}, "node-7", further) == named
    assert domains({"zone": "z"}, None, further) == {"zone": "z"}
