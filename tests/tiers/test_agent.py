import functools
import json
import logging
import os
import select
import socket
import stat

import pytest
import trustme

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.peers import agent, agent_server, secret
from elastic_ckpt.tiers.ram import machine
from tests.tiers import served

CONTENT = bytes(range(256)) * 8
FILES = {"data/part": CONTENT, "state/a%2Fb/c/0": b"quoted"}
PART = "/hosts/0/30-0/data/part"
OUTSIDE = b"this is not for others"


@pytest.fixture
def root(tmp_path):
    served.save(tmp_path / "root", 30, FILES)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "part").write_bytes(OUTSIDE)
    (tmp_path / "root" / "hosts" / "file").write_bytes(OUTSIDE)
    return tmp_path / "root"


@pytest.fixture
def service(root):
    return agent.Service(root=str(root))


@pytest.fixture
def url(service):
    with served.serving(service) as address:
        yield address.url


@pytest.fixture
def known(root, url):  # noqa: ARG001  (the agent makes it)
    return secret.read_or_create(root)


class TestFiles:
    def test_files_and_ranges_are_served_and_a_name_is_decoded_once(self, url, known):
        assert served.ask(url, PART, known) == (200, CONTENT)
        path = "/hosts/0/30-0/state/a%252Fb/c/0"
        assert served.ask(url, path, known) == (200, b"quoted")
        for asked, part in {
            "0-0": slice(0, 1),
            "5-99": slice(5, 100),
            "100-": slice(100, None),
            "-7": slice(-7, None),
            "2000-999999": slice(2000, None),
        }.items():
            content = served.ask(url, PART, known, f"Range: bytes={asked}")
            assert content == (206, CONTENT[part])
        for asked in ("2048-", "9999-99999", "5-4", "-", "a-b", "0-1,4-5", "9" * 5000):
            answer = served.ask(url, PART, known, f"Range: bytes={asked}")
            assert answer[0] == 416, asked
        with served.connect(url) as connection:
            request = (
                f"HEAD /v1/root{PART} HTTP/1.0\r\nAuthorization: Bearer {known}\r\n\r\n"
            )
            connection.sendall(request.encode())
            head, _, body = served.until_closed(connection).partition(b"\r\n\r\n")
        assert b"Content-Length: 2048" in head
        assert body == b""

    def test_a_file_that_is_replaced_while_it_is_read_is_the_one_that_was_opened(
        self, root, url, known
    ):
        file = root / "hosts/0/30-0/data/big"
        file.write_bytes(b"a" * 2**23)
        with served.connect(url) as connection:
            request = (
                f"GET /v1/root{PART[:-4]}big HTTP/1.0\r\nAuthorization: Bearer {known}"
            )
            connection.sendall(f"{request}\r\n\r\n".encode())
            connection.recv(1)
            (root / "new").write_bytes(b"b" * 2**23)
            os.replace(root / "new", file)
            body = served.until_closed(connection).partition(b"\r\n\r\n")[2]
        assert body == b"a" * 2**23


class TestLists:
    def test_the_steps_are_those_with_a_manifest_now(self, root, url, known):
        served.save(root, 40, FILES, slot="1")
        (root / "hosts/0/50-0").mkdir()
        (root / "hosts/0/60-0").mkdir()
        os.symlink(
            root / f"hosts/0/30-0/manifest-{served.MACHINE}.0",
            root / "hosts/0/60-0/manifest-a",
        )
        (root / "hosts/0/notes").mkdir()
        (root / "hosts/0/notes/manifest-a").write_bytes(b"")
        os.symlink(root / "hosts/0", root / "hosts/7")
        status, body = served.ask(url, "/steps", known)
        assert status == 200
        expected = []
        for name in ("0/30-0", "1/40-0"):
            name += f"/manifest-{served.MACHINE}.{name[0]}"
            there = os.stat(root / "hosts" / name)
            expected.append([name, there.st_size, there.st_mtime])
        assert json.loads(body) == {
            "machine": machine.machine_id(root),
            "manifests": expected,
        }

    def test_a_root_without_hosts_has_no_steps(self, tmp_path):
        with served.serving(agent.Service(root=str(tmp_path))) as address:
            known = secret.read_or_create(tmp_path)
            status, body = served.ask(address.url, "/steps", known)
        assert status == 200
        assert json.loads(body)["manifests"] == []


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


class TestAttacks:
    """What strangers and clients with the secret may try at one live agent."""

    def test_without_the_secret_nothing_is_there(self, url, known):
        for header in (
            "X-Nothing: at all",
            "Authorization: Bearer",
            "Authorization: Bearer {}x",
            "Authorization: bearer {}",
            "Authorization: {}",
            "Authorization: Basic {}",
            "Authorization: Bearer \u2603",
            "Cookie: secret={}",
        ):
            for path in ("/steps", PART, "/hosts/0/none"):
                assert served.ask(url, path, "", header.format(known))[0] == 401
        assert served.ask(url, f"{PART}?secret={known}", "")[0] == 401
        other = url.replace("/v1/root", "/v1/other")
        assert served.ask(other, PART, known)[0] == 401

    def test_no_path_leads_out_of_the_tree(self, url, known):
        for path in PATHS:
            status, body = served.ask(url, path, known)
            # A request that is not HTTP is answered with its fault.
            assert status in (400, 404), path
            for content in (known.encode(), OUTSIDE, CONTENT):
                assert content not in body, path

    @pytest.mark.parametrize(
        "level", ["hosts", "hosts/0", "hosts/0/30-0", "hosts/0/30-0/data"]
    )
    def test_no_link_to_a_directory_is_followed(self, root, url, known, level):
        (root / level).rename(root / "elsewhere")
        (root / level).symlink_to(root / "elsewhere")
        assert served.ask(url, PART, known)[0] == 404
        listed = json.loads(served.ask(url, "/steps", known)[1])
        assert len(listed["manifests"]) == level.endswith("data")

    def test_links_pipes_sockets_and_hidden_files_are_not_served(
        self, root, url, known
    ):
        directory = root / "hosts/0/30-0/data"
        (directory / "link").symlink_to(root / "secret")
        (directory / "near").symlink_to("part")
        (directory / ".part.x7").write_bytes(OUTSIDE)
        os.mkfifo(directory / "pipe")
        with socket.socket(socket.AF_UNIX) as unix:
            place = os.open(directory, os.O_RDONLY)
            unix.bind(f"/proc/self/fd/{place}/socket")
            os.close(place)
            for name in ("link", "near", ".part.x7", "pipe", "socket"):
                assert served.ask(url, PART[:-4] + name, known)[0] == 404

    def test_nothing_can_be_written_and_headers_are_bounded(
        self, root, url, known, caplog
    ):
        body = ("Content-Length: 5", "", "hello")
        for method in ("POST", "DELETE", "OPTIONS"):
            assert served.ask(url, PART, known, method=method)[0] == 405
            assert served.ask(url, PART, known, *body, method=method)[0] == 405
        assert (root / "hosts/0/30-0/data/part").read_bytes() == CONTENT
        for headers in (["X: " + "a" * 9000], [f"X-{n}: a" for n in range(999)]):
            assert served.ask(url, PART, known, *headers)[0] == 400
        assert not caplog.records

    def test_nothing_is_held_or_repaired_outside_of_the_steps(self, root, url, known):
        body = ("Content-Length: 2", "", "60")
        put = functools.partial(served.ask, url, method="PUT")
        before = sorted(root.parent.rglob("*"))
        for name in ("30-0%2F..%2F..%2Fx", "30-..", "30-", "x", "30-0/x", "..%2fx"):
            for path in (f"/holds/{name}", f"/hosts/0/{name}/data/part"):
                assert put(path, known, *body)[0] in (404, 405, 409), path
        assert put("/holds/30-0", "x" * 32, *body)[0] == 401
        assert sorted(root.parent.rglob("*")) == before
        assert put("/holds/30-0", known, *body)[0] == 204
        assert preserved.held(root) == {30}
        assert put("/holds/30-0", known, "Content-Length: 1", "", "x")[0] == 400
        assert put("/holds/30-0", known, "Content-Length: 1", "", "0")[0] == 204
        assert preserved.held(root) == set()

    def test_what_a_broken_request_said_is_not_logged(self, url, known, caplog):
        caplog.set_level(logging.DEBUG)
        served.ask(url, PART, known, "X\x01: a", f"Authorization Bearer {known}")
        with served.connect(url) as connection:
            connection.sendall(f"{known}\r\n\r\n".encode())
            served.until_closed(connection)
        assert known not in caplog.text


class TestLimits:
    """A cap on connections, and a time limit for headers, on a real server."""

    @pytest.mark.parametrize("is_encrypted", [False, True])
    def test_a_connection_without_a_request_is_closed_after_a_while(
        self, root, tmp_path, monkeypatch, is_encrypted
    ):
        monkeypatch.setattr(agent_server, "HEADERS_WITHIN_SECS", 0.1)
        certificate = None
        if is_encrypted:
            certificate = str(tmp_path / "host.pem")
            issued = trustme.CA().issue_cert("127.0.0.1")
            issued.private_key_and_cert_chain_pem.write_to_path(certificate)
        service = agent.Service(root=str(root), tls_certificate=certificate)
        with served.serving(service) as address:
            for begun in (b"", b"GET /v1/root/steps HTTP/1.1\r\nHost: "):
                with served.connect(address.url) as connection:
                    connection.sendall(begun)
                    # With TLS an alert says that this was none.
                    assert len(served.until_closed(connection)) < 10
            # One that has shown the secret is kept.
            if not is_encrypted:
                with alive(address.url, root) as connection:
                    assert not select.select([connection], [], [], 0.3)[0]

    def test_one_connection_too_many_is_closed_until_another_ends(
        self, root, service, monkeypatch
    ):
        monkeypatch.setattr(agent_server, "MOST_CONNECTIONS", 2)
        with served.serving(service) as address:
            one, two = (alive(address.url, root) for _ in range(2))
            with served.connect(address.url) as third:
                assert served.until_closed(third) == b""
            one.close()
            three = None
            while three is None:
                three = alive(address.url, root)
            for connection in (two, three):
                connection.close()


class TestSecret:
    def test_it_is_made_once_and_for_its_owner_alone(self, tmp_path):
        made = secret.read_or_create(tmp_path)
        assert secret.read_or_create(tmp_path) == made
        assert len(made) >= 43
        assert stat.S_IMODE(os.stat(tmp_path / "secret").st_mode) == 0o600
        assert os.listdir(tmp_path) == ["secret"]
        secret.adopt(tmp_path / "other", "x" * 32)
        (tmp_path / "secret").unlink()
        (tmp_path / "secret").symlink_to(tmp_path / "other" / "secret")
        with pytest.raises(errors.RunError, match="not a file of mode 0600"):
            secret.read_or_create(tmp_path)

    def test_a_running_agent_takes_on_the_one_that_is_adopted(self, root, url, known):
        secret.adopt(root, "agreed-by-the-new-world")
        assert stat.S_IMODE(os.stat(root / "secret").st_mode) == 0o600
        assert served.ask(url, PART, known)[0] == 401
        assert served.ask(url, PART, "agreed-by-the-new-world") == (200, CONTENT)
        # Without one any more nobody gets in.
        (root / "secret").write_text("")
        assert served.ask(url, PART, "")[0] == 401
        (root / "secret").unlink()
        assert served.ask(url, PART, known)[0] == 401

    def test_a_file_elsewhere_can_hold_it(self, root, tmp_path):
        (tmp_path / "mounted").write_text("given-by-the-cluster\n")
        service = agent.Service(root=str(root), secret_file=str(tmp_path / "mounted"))
        with served.serving(service) as address:
            assert served.ask(address.url, PART, "given-by-the-cluster")[0] == 200


class TestLife:
    def test_it_says_where_it_listens_as_long_as_it_does(self, root, service):
        for _ in range(2):
            with served.serving(service) as address:
                assert agent.find(root) == address
                assert address.machine == machine.machine_id(root)
                assert address.pid == os.getpid()
                known = secret.read_or_create(root)
                assert known not in (root / "agent.json").read_text()
                assert served.ask(address.url, PART, known)[0] == 200
                with (
                    pytest.raises(errors.RunError, match=f"serves .*{address.url}"),
                    served.serving(service),
                ):
                    pass
            assert agent.find(root) is None

    def test_its_end_ends_transfers_and_idle_connections(self, root, service):
        (root / "hosts/0/30-0/data/big").write_bytes(bytes(2**25))
        with served.serving(service) as address:
            idle = alive(address.url, root)
            known = secret.read_or_create(root)
            busy = served.connect(address.url)
            request = f"GET /v1/root{PART[:-4]}big HTTP/1.1\r\nHost: there\r\n"
            busy.sendall(f"{request}Authorization: Bearer {known}\r\n\r\n".encode())
            busy.recv(1)
        with idle, busy:
            assert served.until_closed(idle) == b""
            assert len(served.until_closed(busy)) < 2**25


def alive(url, root):
    """A connection that has been answered and stays open, or None if it was refused."""
    connection = served.connect(url)
    known = secret.read_or_create(root)
    request = (
        f"HEAD /v1/root{PART} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {known}"
    )
    try:
        connection.sendall(f"{request}\r\n\r\n".encode())
        if connection.recv(2**12):
            return connection
    except ConnectionError:
        pass
    connection.close()
    return None
