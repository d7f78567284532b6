import contextlib
import json
import logging
import os
import select
import signal
import socket
import stat

import pytest
import trustme

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.peers import agent, agent_server, secret
from elastic_ckpt.tiers.ram import machine
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
    with pytest.raises(errors.RunError, match="not a file of mode 0600"):
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
