import concurrent.futures
import contextlib
import itertools
import json
import signal
import urllib.parse

import hypothesis
import pytest
import trustme
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, checked_blobs
from elastic_ckpt.tiers import find, source
from elastic_ckpt.tiers.peers import (
    agent,
    peer,
    peer_client,
    secret,
)
from tests.tiers import read_contract, served
from tests.tiers.scripted_peer import ScriptedPeer, answer, wanted_range
from tests.tiers.tiered_steps import steps_of

SECRET = "the-secret-of-this-run"
PATH = "/hosts/0/30-0/data/part"
CONTENT = bytes(range(256)) * 2**14
FILES = {"data/part": CONTENT}
# A peer that sends nothing for so long fails.
SHORT_SECS = 0.5


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    # As many attempts as there are, without the time between.
    monkeypatch.setattr(peer_client, "RETRY_SECS", (0.0,) * len(peer_client.RETRY_SECS))


@pytest.fixture
def root(tmp_path):
    secret.adopt(tmp_path, SECRET)
    served.save(tmp_path, 30, FILES)
    return tmp_path


@pytest.fixture
def url(root):
    with served.serving(agent.Service(root=str(root))) as address:
        yield address.url


@pytest.fixture
def client():
    # No test of anything else waits for it, however busy the machine is.
    with contextlib.closing(peer_client.PeerClient(SECRET, timeout_secs=600)) as made:
        yield made


@pytest.fixture
def hasty():
    with contextlib.closing(
        peer_client.PeerClient(SECRET, timeout_secs=SHORT_SECS)
    ) as made:
        yield made


def read(client, url):
    into = bytearray(len(CONTENT))
    client.endpoint(url).read_into(PATH, memoryview(into))
    return bytes(into)


def source_at(url, client, step=30):
    """The only source of a peer."""
    offered = peer.Peer(url, client, served.RUN).offers(step)
    assert offered.problems == []
    ((_, file_source),) = offered.copies
    return file_source


class TestPeerSource(read_contract.ReadContract):
    @pytest.fixture
    def file_source(self, root, client):
        served.save(root, 30, read_contract.FILES)
        with served.serving(agent.Service(root=str(root))) as address:
            yield source_at(address.url, client)


class TestOffers:
    def test_a_peer_offers_what_its_manifests_say(self, root, url, client):
        served.save(root, 40, FILES, slot="0")
        served.save(root, 40, {"data/part": b"other"}, slot="1")
        tier = peer.Peer(url, client, served.RUN)
        assert steps_of(tier) == [30, 40]
        offered = tier.offers(40)
        assert offered.problems == []
        there = {each.host.id[-1]: each.to_bytes() for each, _ in offered.copies}
        assert there == {
            slot: served.manifest_of(40, files, slot=slot).at("local", url).to_bytes()
            for slot, files in (("0", FILES), ("1", {"data/part": b"other"}))
        }
        by_host = {each.host.id[-1]: parts for each, parts in offered.copies}
        into, leaf = bytearray(5), served.leaf_of("data/part", b"other")
        by_host["1"].read_into(leaf, boxes.whole(leaf.shape), memoryview(into))
        assert into == b"other"

    def test_manifests_that_are_known_are_read_again_only_when_they_change(
        self, root, url, client
    ):
        served.save(root, 40, FILES, slot="0")

        def offered():
            peer.Peer(url, client, served.RUN).offers(40)
            return {
                (each.host.id, len(each.contents.files)): each
                for each in client.endpoint(url).manifests.values()
            }

        before = offered()
        served.save(root, 40, {"data/part": b"other"}, slot="1")
        after = offered()
        assert len(after) == 2
        ((first, manifest),) = before.items()
        assert after[first] is manifest
        served.save(root, 40, {**FILES, "data/more": b"copy"}, slot="0")
        assert {number for _, number in offered()} == {1, 2}
        assert len(offered()) == 2

    def test_manifests_of_another_run_or_step_or_host_are_problems(
        self, root, url, client
    ):
        served.save(root, 40, FILES, run="other")
        served.save(root, 50, FILES, slot="1")
        steps = root / "hosts/1"
        (steps / "50-0").rename(steps / "60-0")
        moved = served.save(root, 70, FILES, slot="2")
        (moved / f"manifest-{served.MACHINE}.2").rename(moved / "manifest-a")
        tier = peer.Peer(url, client, served.RUN)
        for step in (40, 60, 70):
            copies, problems = tier.offers(step)
            assert copies == []
            assert "is that of run, step and file" in problems[0]

    def test_a_manifest_that_was_altered_or_is_later_is_a_problem_beside_the_others(
        self, root, url, client
    ):
        directory = served.save(root, 30, FILES, slot="1")
        file = directory / f"manifest-{served.MACHINE}.1"
        for content, why in (
            (file.read_bytes().replace(served.RUN.encode(), b"run-8"), "or altered"),
            (checked_blobs.to_bytes({}, [], version=2), "later version"),
        ):
            file.write_bytes(content)
            offered = peer.Peer(url, client, served.RUN).offers(30)
            hosts = [each.host.id for each, _ in offered.copies]
            assert hosts == [f"{served.MACHINE}.0"]
            (problem,) = offered.problems
            assert f"manifest 1/30-0/manifest-{served.MACHINE}.1" in problem
            assert why in problem

    def test_a_giant_manifest_is_a_problem_and_is_not_read(
        self, url, client, monkeypatch
    ):
        monkeypatch.setattr(peer, "MOST_MANIFEST_BYTES", 100)
        copies, problems = peer.Peer(url, client, served.RUN).offers(30)
        assert copies == []
        assert "at most 100 are taken" in problems[0]

    def test_a_list_or_a_manifest_that_is_none_is_a_problem(self, client):
        path = "0/30-0/manifest-a"
        listings = [
            b"",
            b"\xff",
            b"{}x",
            b"7",
            b"[7]",
            b"{}",
            b'{"a": 1}',
            b"[" * 10**5,
        ]
        for wrong in (
            *([], [path], [path, 1, "x"], [7, 1, 1.0], [path, None, 1.0]),
            *(["0/30/m", 1, 1.0], ["0/-1-0/m", 1, 1.0], ["a/0/30-0/m", 1, 1.0]),
        ):
            listings.append(json.dumps({"machine": "m", "manifests": [wrong]}).encode())
        listings.append(b'{"machine": "m", "manifests": [["' + b"9" * 5000 + b'"]]}')
        for listing in listings:
            respond = lambda c, _, body=listing: c.sendall(answer(body))  # noqa: E731
            with ScriptedPeer(respond) as lying:
                tier = peer.Peer(lying.url, client, served.RUN)
                assert steps_of(tier) == []
                copies, (problem,) = tier.offers(30)
            assert copies == []
            assert "the list of steps cannot be read" in problem

        def nested(connection, request):
            steps = request.startswith(b"GET /steps ")
            listing = {"machine": "m", "manifests": [[path, 1, 1.0]]}
            body = json.dumps(listing).encode() if steps else b"[" * 10**6
            connection.sendall(answer(body))

        with ScriptedPeer(nested) as lying:
            copies, problems = peer.Peer(lying.url, client, served.RUN).offers(30)
        assert (copies, len(problems)) == ([], 1)


LIES = [
    answer(CONTENT),
    answer(CONTENT[:-1], status="206 OK"),
    answer(CONTENT[:9], status="206 OK", headers=["Content-Range: bytes 0-8/9"]),
    b"HTTP/1.1 206 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n",
    b"HTTP/1.1 206 OK\r\nContent-Length: " + b"9" * 30000 + b"\r\n\r\n",
    b"HTTP/1.1 999999 OK\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    answer(b"[]", status=f"206 {SECRET}", headers=[f"Content-Range: {SECRET}"]),
    SECRET.encode() + b"\r\n" + answer(b"[]", headers=[f"X: {SECRET}"]),
    answer(b"", status="204 Nothing"),
    answer(b"", status="302 There", headers=["Location: http://127.0.0.1:9/"]),
    answer(b"", status="304 As before"),
    answer(b"no", status="401 Who"),
    answer(b"", status="404 Nowhere"),
    answer(b"", status="503 Later"),
]


class TestLies:
    def test_a_wrong_answer_is_a_read_error(self, client):
        for response in LIES:
            respond = lambda c, _, body=response: c.sendall(body)  # noqa: E731
            with ScriptedPeer(respond) as lying:
                with pytest.raises(source.ReadError, match=lying.url) as raised:
                    read(client, lying.url)
                assert len(lying.requests) == 1, response
                # What it says does not carry the secret into messages.
                assert SECRET not in str(raised.value)

    @hypothesis.given(
        response=st.binary(max_size=300)
        | st.binary(max_size=300).map(lambda rest: b"HTTP/1.1 206 OK\r\n" + rest)
    )
    @hypothesis.settings(
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    def test_any_answer_is_a_read_error(self, response):
        def respond(connection, _):
            connection.sendall(response)
            connection.shutdown(2)

        with (
            contextlib.closing(
                peer_client.PeerClient(SECRET, timeout_secs=600)
            ) as client,
            ScriptedPeer(respond) as lying,
            pytest.raises(source.ReadError),
        ):
            read(client, lying.url)

    @pytest.mark.parametrize("endless", [b"X: a\r\n", b"HTTP/1.1 200 " * 9])
    def test_headers_without_an_end_are_a_read_error(self, client, endless):
        def respond(connection, _):
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + endless * 10**5)

        with (
            ScriptedPeer(respond) as lying,
            pytest.raises(source.ReadError, match="does not speak HTTP"),
        ):
            read(client, lying.url)


class TestPatience:
    def test_a_peer_that_says_nothing_costs_one_timeout_and_is_then_skipped(
        self, hasty
    ):
        with ScriptedPeer(lambda *_: None) as silent:
            with pytest.raises(source.ReadError, match="timed out"):
                read(hasty, silent.url)
            for _ in range(3):
                with pytest.raises(source.ReadError, match="is left alone for"):
                    read(hasty, silent.url)
            assert silent.num_connections == 1

    def test_a_machine_without_an_agent_is_tried_some_times(self, client):
        with ScriptedPeer(lambda *_: None) as gone:
            pass
        with pytest.raises(source.ReadError, match="refused"):
            read(client, gone.url)
        with pytest.raises(source.ReadError, match="is left alone for"):
            read(client, gone.url)


class TestBreaks:
    def test_a_transfer_goes_on_where_it_broke(self, client):
        def cut(connection, request):
            first, last = wanted_range(request)
            headers = [f"Content-Range: bytes {first}-{last}/{len(CONTENT)}"]
            response = answer(
                CONTENT[first : last + 1], status="206 OK", headers=headers
            )
            connection.sendall(response[: 2**20 + 2**19])
            connection.shutdown(2)

        with ScriptedPeer(cut) as breaking:
            assert read(client, breaking.url) == CONTENT
            asked = [wanted_range(request)[0] for request in breaking.requests]
        # No byte is asked for again that came.
        assert [number // 2**20 for number in asked] == [0, 1, 2]

    def test_a_transfer_that_makes_no_progress_is_tried_some_times(self, client):
        with ScriptedPeer(lambda connection, _: connection.shutdown(2)) as breaking:
            with pytest.raises(source.ReadError):
                read(client, breaking.url)
            assert len(breaking.requests) == 1 + len(peer_client.RETRY_SECS)

    def test_connections_are_kept_until_the_peer_closes_them(self, client):
        closes = False

        def respond(connection, _):
            # It may change once the response is there.
            is_last = closes
            connection.sendall(answer(b"[]"))
            if is_last:
                connection.shutdown(2)

        with ScriptedPeer(respond) as keeping:
            endpoint = client.endpoint(keeping.url)
            for number in (1, 1, 1, 1, 2, 3):
                assert endpoint.read("/steps", most_bytes=9) == b"[]"
                assert keeping.num_connections == number
                closes = len(keeping.requests) >= 3

    def test_an_agent_that_is_killed_and_started_again_is_gone_on_with(
        self, root, monkeypatch
    ):
        # As long as it takes.
        monkeypatch.setattr(peer_client, "RETRY_SECS", (0.0, *[0.1] * 600))
        content = CONTENT * 2
        (root / "hosts/0/30-0/data/part").write_bytes(content)
        into = bytearray(len(content))
        slow = peer_client.PeerClient(SECRET, timeout_secs=600, max_bytes_per_sec=2**24)
        with (
            contextlib.closing(slow),
            concurrent.futures.ThreadPoolExecutor(1) as executor,
        ):
            with served.agent_process(root) as (process, url):
                endpoint = slow.endpoint(url)
                reading = executor.submit(endpoint.read_into, PATH, memoryview(into))
                while into[2**20 + 255] == 0:
                    assert not reading.done()
                process.send_signal(signal.SIGKILL)
                process.wait()
            assert not reading.done()
            port = str(urllib.parse.urlsplit(url).port)
            with served.agent_process(root, "--port", port):
                reading.result()
        assert into == content


class TestSharing:
    def test_the_secret_may_be_another_one_later(self, root, url):
        known = iter([SECRET, "wrong", "agreed-by-the-new-world"])
        with contextlib.closing(peer_client.PeerClient(lambda: next(known))) as client:
            assert read(client, url) == CONTENT
            with pytest.raises(
                source.ReadError, match="does not take the run's secret"
            ):
                read(client, url)
            secret.adopt(root, "agreed-by-the-new-world")
            assert read(client, url) == CONTENT

    def test_proxies_of_the_environment_are_ignored(self, url, client, monkeypatch):
        with ScriptedPeer(lambda *_: None) as proxy:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
                monkeypatch.setenv(name, proxy.url)
            monkeypatch.delenv("no_proxy", raising=False)
            assert read(client, url) == CONTENT
            assert proxy.num_connections == 0

    @hypothesis.given(
        takes=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10)), min_size=1)
    )
    def test_over_any_time_no_more_passes_than_the_bound_and_a_burst(self, takes):
        now = 0.0
        bound = peer_client.Bandwidth(1000, clock=lambda: now)
        passed = []
        for num_bytes, idle_secs in takes:
            passed.append((now, num_bytes))
            now += bound.take(num_bytes) + idle_secs
        for first, last in itertools.combinations_with_replacement(
            range(len(takes)), 2
        ):
            (began, _), (ended, most) = passed[first], passed[last]
            total = sum(num_bytes for _, num_bytes in passed[first : last + 1])
            assert total <= 1000 * (ended - began) * (1 + 1e-9) + 126 + most


class TestPeers:
    def test_many_peers_are_one_tier_and_a_broken_one_is_asked_once(
        self, root, url, tmp_path, client
    ):
        served.save(root, 40, FILES, slot="1")
        other = tmp_path / "other"
        secret.adopt(other, SECRET)
        served.save(other, 30, FILES, slot="2")
        served.save(other, 20, FILES, slot="2")
        with (
            served.serving(agent.Service(root=str(other))) as address,
            ScriptedPeer(lambda c, _: c.sendall(b"?\r\n")) as broken,
        ):
            peers = [
                peer.Peer(each, client, served.RUN)
                for each in (url, broken.url, address.url)
            ]
            assert {each.step for each in find.saves(peers)} == {20, 30, 40}
            for _ in range(3):
                copies, (problem,) = find.offered(peers, 30)
                assert {each.host.id[-1] for each, _ in copies} == {"0", "2"}
                assert f"the list of steps cannot be read: {broken.url}" in problem
            assert broken.num_connections == 1


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Certificates as a deployment has them: of an authority, and of another one."""
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other"):
        ca = trustme.CA()
        ca.cert_pem.write_to_path(directory / f"{name}.pem")
        for host in ("127.0.0.1", "elsewhere.example"):
            issued = ca.issue_cert(host)
            file = directory / f"{name}-{host}.pem"
            issued.private_key_and_cert_chain_pem.write_to_path(file)
    return directory


class TestTls:
    """What a client reads of an agent, by both certificates."""

    @pytest.fixture
    def serve(self, root, authority):
        @contextlib.contextmanager
        def serve(certificate, **options):
            file = str(authority / f"{certificate}.pem")
            service = agent.Service(
                root=str(root), tls_certificate=file, tls_key=file, **options
            )
            with served.serving(service) as address:
                assert address.url.startswith("https://")
                yield address

        return serve

    @staticmethod
    def content(address, ca):
        with contextlib.closing(peer_client.PeerClient(SECRET, tls_ca=ca)) as client:
            return read(client, address.url)

    @pytest.mark.parametrize(
        ("certificate", "ca", "why"),
        [
            ("ca-127.0.0.1", "ca.pem", None),
            ("ca-127.0.0.1", "other.pem", "certificate verify failed"),
            ("ca-127.0.0.1", None, "certificate verify failed"),
            ("ca-elsewhere.example", "ca.pem", "certificate verify failed"),
        ],
    )
    def test_an_agent_is_read_by_its_authority_and_its_name(
        self, serve, authority, certificate, ca, why
    ):
        with serve(certificate) as address, contextlib.ExitStack() as refused:
            if why:
                refused.enter_context(pytest.raises(source.ReadError, match=why))
            assert self.content(address, ca and authority / ca) == CONTENT

    def test_with_tls_on_one_side_alone_nothing_is_told(self, serve, authority):
        with (
            ScriptedPeer(lambda *_: None) as plain,
            contextlib.closing(
                peer_client.PeerClient(SECRET, tls_ca=authority / "ca.pem")
            ) as client,
        ):
            with pytest.raises(source.ReadError, match="does not encrypt"):
                read(client, plain.url)
            assert plain.num_connections == 0
        with (
            serve("ca-127.0.0.1") as address,
            contextlib.closing(peer_client.PeerClient(SECRET)) as client,
            pytest.raises(source.ReadError),
        ):
            read(client, address.url.replace("https", "http"))
