"""The agent of a run, attacked by strangers; that of a node, whose runs come and go."""

import contextlib
import http.server
import json
import logging
import os
import select
import signal
import socket
import ssl
import stat
import time
from concurrent import futures

import pytest
import trustme

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers import choices, preserved
from elastic_ckpt.tiers.peers import agent, agent_server, secret
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served
from tests.tiers.served import PART

CONTENT = bytes(range(256)) * 8
FILES = {"data/part": CONTENT, "state/a%2Fb/c/0": b"quoted"}
OUTSIDE = b"this is not for others"
# What leads out of the tree, or nowhere.
PATHS = [
    *("", "/", "/secret", "/hosts", "/hosts/secret", "/hosts/file", "/hosts/../secret"),
    *("/hosts/./0/30-0/data/part", "/hosts/0/30-0/../30-0/data/part"),
    *("/hosts/0/30-0/../../../secret", "/hosts/0/30-0/%2e%2e/%2e%2e/%2e%2e/secret"),
    *("/hosts/0/30-0/..%2f..%2f..%2fsecret", "/hosts/0/30-0/..\\..\\..\\secret"),
    "/hosts/0/30-0/%252e%252e/%252e%252e/%252e%252e/secret",
    *(f"{PART}%00", f"{PART}/", "/hosts/0/30-0//data/part", "/hosts/0/30-0/data"),
    *("/hosts//etc/passwd", "/hosts/%2fetc%2fpasswd", "/hosts/0/30-0/\udcff\udcfe"),
    *("/hosts/0/30-0/" + "a/" * 3000 + "a", "/hosts/" + "../" * 2000 + "etc/passwd"),
]
# What a stranger may send who knows all but how the secret is shown.
HEADERS = [
    *("X-Nothing: at all", "Authorization: Bearer", "Authorization: Bearer {}x"),
    *("Authorization: bearer {}", "Authorization: {}", "Authorization: Basic {}"),
    *("Authorization: Bearer \u2603", "Cookie: secret={}"),
]


@pytest.fixture
def root(tmp_path):
    served.save(tmp_path / "root", 30, FILES)
    (tmp_path / "root" / "hosts" / "file").write_bytes(OUTSIDE)
    return tmp_path / "root"


@pytest.fixture
def url(root):
    with served.serving(agent.Service(root=str(root))) as address:
        yield address.url


@pytest.fixture
def known(root, url):  # noqa: ARG001  (the agent makes it)
    return secret.read_or_create(root)


@pytest.fixture
def ask(url, known):
    """Asks the agent; the secret is that of the run unless another is given."""

    def ask(path, *headers, given=known, method="GET"):
        return served.ask(url, path, given, *headers, method=method)

    return ask


def alive(url, root):
    """A connection that was answered and stays open, tried until it is not refused."""
    known = secret.read_or_create(root)
    headers = f"Host: a\r\nAuthorization: Bearer {known}\r\n\r\n"
    while True:
        connection = served.connect(url)
        with contextlib.suppress(ConnectionError):
            connection.sendall(f"HEAD /v1/root{PART} HTTP/1.1\r\n{headers}".encode())
            if connection.recv(2**12):
                return connection
        connection.close()


def test_files_and_ranges_are_served_and_a_name_is_decoded_once(ask):
    assert ask(PART) == (200, CONTENT)
    assert ask(PART, method="HEAD") == (200, b"")
    assert ask("/hosts/0/30-0/state/a%252Fb/c/0") == (200, b"quoted")
    ranges = {"0-0": (0, 1), "5-99": (5, 100), "100-": (100, 2048), "-7": (2041, 2048)}
    for asked, (start, stop) in {**ranges, "2000-999999": (2000, 2048)}.items():
        assert ask(PART, f"Range: bytes={asked}") == (206, CONTENT[start:stop])
    for asked in ("2048-", "9999-99999", "5-4", "-", "a-b", "0-1,4-5", "9" * 5000):
        assert ask(PART, f"Range: bytes={asked}")[0] == 416, asked


def test_the_steps_are_those_with_a_manifest_now(root, ask, tmp_path):
    hosts, name = root / "hosts", f"manifest-{served.MACHINE}"
    served.save(root, 40, FILES, slot="1")
    for directory in ("50-0", "60-0", "notes"):
        (hosts / "0" / directory).mkdir()
    (hosts / "0/60-0/manifest-a").symlink_to(hosts / f"0/30-0/{name}.0")
    (hosts / "0/notes/manifest-a").write_bytes(b"")
    (hosts / "7").symlink_to(hosts / "0")
    expected = []
    for path in (f"0/30-0/{name}.0", f"1/40-0/{name}.1"):
        there = os.stat(hosts / path)
        expected.append([path, there.st_size, there.st_mtime])
    status, body = ask("/steps")
    listed = {"machine": machine.machine_id(root), "manifests": expected}
    assert (status, json.loads(body)) == (200, listed)
    assert agent_server.listing(tmp_path) == {"machine": None, "manifests": []}


def test_without_the_secret_nothing_is_there(ask, url, known):
    for header in HEADERS:
        for path in ("/steps", PART, "/hosts/0/none"):
            assert ask(path, header.format(known), given="")[0] == 401
    assert ask(f"{PART}?secret={known}", given="")[0] == 401
    assert served.ask(url.replace("/v1/root", "/v1/other"), PART, known)[0] == 401


def test_no_path_leads_out_of_the_tree(ask, known):
    for path in PATHS:
        status, body = ask(path)
        # A request that is not HTTP is answered with its fault.
        assert status in (400, 404), path
        for content in (known.encode(), OUTSIDE, CONTENT):
            assert content not in body, path


def test_no_link_is_followed_and_nothing_hidden_or_special_is_served(root, ask):
    directory = root / "hosts/0/30-0/data"
    (directory / "link").symlink_to(root / "secret")
    (directory / "near").symlink_to("part")
    (directory / ".part.x7").write_bytes(OUTSIDE)
    os.mkfifo(directory / "pipe")
    with socket.socket(socket.AF_UNIX) as unix, contextlib.chdir(directory):
        unix.bind("socket")
    for name in ("link", "near", ".part.x7", "pipe", "socket"):
        assert ask(PART[:-4] + name)[0] == 404
    for level in ("hosts", "hosts/0", "hosts/0/30-0", "hosts/0/30-0/data"):
        (root / level).rename(root / "elsewhere")
        (root / level).symlink_to(root / "elsewhere")
        assert ask(PART)[0] == 404
        listed = json.loads(ask("/steps")[1])
        assert len(listed["manifests"]) == level.endswith("data")
        (root / level).unlink()
        (root / "elsewhere").rename(root / level)


def test_nothing_can_be_written_and_no_bad_request_is_logged(root, ask, known, caplog):
    caplog.set_level(logging.DEBUG)
    for method in ("POST", "DELETE", "OPTIONS"):
        for body in ((), ("Content-Length: 5", "", "hello")):
            assert ask(PART, *body, method=method)[0] == 405
    assert (root / "hosts/0/30-0/data/part").read_bytes() == CONTENT
    for headers in (
        ["X: " + "a" * 9000],
        [f"X-{n}: a" for n in range(999)],
        ["X\x01: a", f"Authorization Bearer {known}"],
    ):
        assert ask(PART, *headers)[0] == 400
    assert not caplog.records


def test_nothing_is_held_or_repaired_outside_of_the_steps(root, ask):
    def put(path, body="60", **options):
        length = f"Content-Length: {len(body)}"
        return ask(path, length, "", body, method="PUT", **options)[0]

    before = sorted(root.parent.rglob("*"))
    for name in ("30-0%2F..%2F..%2Fx", "30-..", "30-", "x", "30-0/x", "..%2fx"):
        for path in (f"/holds/{name}", f"/hosts/0/{name}/data/part"):
            assert put(path) in (404, 405, 409), path
    assert put("/holds/30-0", given="x" * 32) == 401
    assert sorted(root.parent.rglob("*")) == before
    for secs, status, held in (("60", 204, {30}), ("x", 400, {30}), ("0", 204, set())):
        assert put("/holds/30-0", secs) == status
        assert preserved.held(root) == held


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_silent_connection_is_closed(root, tmp_path, monkeypatch, is_encrypted):
    monkeypatch.setattr(agent_server, "HEADERS_WITHIN_SECS", 0.1)
    certificate = str(tmp_path / "host.pem")
    issued = trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem
    issued.write_to_path(certificate)
    tls = {"tls_certificate": certificate} if is_encrypted else {}
    with served.serving(agent.Service(root=str(root), **tls)) as address:
        for begun in (b"", b"GET /v1/root/steps HTTP/1.1\r\nHost: "):
            with served.connect(address.url) as connection:
                connection.sendall(begun)
                # With TLS an alert says that this was none.
                assert len(served.until_closed(connection)) < 10
        # One that has shown the secret is kept.
        if not is_encrypted:
            with alive(address.url, root) as connection:
                assert not select.select([connection], [], [], 0.3)[0]


def test_one_connection_too_many_is_closed_until_another_ends(root, url, monkeypatch):
    monkeypatch.setattr(agent_server, "MOST_CONNECTIONS", 1)
    with alive(url, root), served.connect(url) as second:
        assert served.until_closed(second) == b""
    alive(url, root).close()


def test_the_secret_is_its_owners_alone_and_may_be_replaced(root, ask, known):
    file, new = root / "secret", "agreed-by-the-new-world"
    assert secret.read_or_create(root) == known
    assert len(known) >= 43
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    secret.adopt(root, new)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert ask(PART)[0] == 401
    assert ask(PART, given=new) == (200, CONTENT)
    # Without one any more nobody gets in.
    file.write_text("")
    assert ask(PART, given="")[0] == 401
    file.unlink()
    assert ask(PART)[0] == 401
    file.symlink_to("other")
    secret.adopt(root.parent, known)
    (root.parent / "secret").rename(root / "other")
    with pytest.raises(errors.RunError, match="owns, with mode 0600"):
        secret.read_or_create(root)


def test_signals_to_all_processes_of_a_job_do_not_end_it(root):
    """Slurm's way: the agent is needed until the last save is done."""
    started = agent.AgentProcess(agent.Service(root=str(root)))
    with contextlib.closing(started):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(started.address.pid, number)
        known = secret.read_or_create(root)
        assert served.ask(started.address.url, PART, known) == (200, CONTENT)
    with pytest.raises(ProcessLookupError):
        os.kill(started.address.pid, 0)
    with pytest.raises(errors.RunError, match="could not be started"):
        agent.AgentProcess(agent.Service(root=str(root / "missing")))


def test_a_transfer_is_of_the_file_that_was_opened_and_ends_with_the_agent(root):
    file, size = root / "hosts/0/30-0/data/big", 2**25
    file.write_bytes(b"a" * size)
    shown = f"Authorization: Bearer {secret.read_or_create(root)}"
    request = f"GET /v1/root{PART[:-4]}big HTTP/1.0\r\n{shown}\r\n\r\n"
    with contextlib.ExitStack() as sockets:
        with served.serving(agent.Service(root=str(root))) as address:
            first, second = (served.connect(address.url) for _ in range(2))
            for each in (first, second):
                sockets.enter_context(each)
                each.sendall(request.encode())
                each.recv(1)
            (root / "new").write_bytes(b"b" * size)
            os.replace(root / "new", file)
            bodies = [served.until_closed(first)]
        bodies.append(served.until_closed(second))
    whole, cut = (body.partition(b"\r\n\r\n")[2] for body in bodies)
    assert whole == b"a" * size
    assert set(cut) <= set(b"a")
    assert len(cut) < size


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
        refused = pytest.raises(errors.RunError, match="another agent already serves")
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
            with pytest.raises(errors.RunError, match="needs permission to get nodes"):
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
