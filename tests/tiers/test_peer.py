import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import urllib.parse

import hypothesis
import numpy as np
import pytest
import trustme
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, checked_blobs
from elastic_ckpt.tiers import find, source
from elastic_ckpt.tiers.peers import agent, peer, peer_client, secret
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served
from tests.tiers.scripted_peer import ScriptedPeer, answer, wanted_range
from tests.tiers.served import PART
from tests.tiers.tiered_steps import steps_of

SECRET = "the-secret-of-this-run"
CONTENT = bytes(range(256)) * 2**14
FILES = {"data/part": CONTENT}
RANDOM = np.random.default_rng(7).bytes(3 * 2**20 + 17)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    # As many attempts as there are, without the time between.
    monkeypatch.setattr(peer_client, "RETRY_SECS", (0.0,) * len(peer_client.RETRY_SECS))


@pytest.fixture
def root(tmp_path):
    secret.adopt(tmp_path, SECRET)
    (tmp_path / machine.FILE).write_text(served.MACHINE)
    served.save(tmp_path, 30, FILES)
    return tmp_path


@pytest.fixture
def service(root):
    return agent.Service(root=str(root))


@pytest.fixture
def url(service):
    with served.serving(service) as address:
        yield address.url


# No test of anything else waits for a peer, however busy the machine is.
def client_of(known=SECRET, *, timeout_secs=600, **options):
    client = peer_client.PeerClient(known, timeout_secs=timeout_secs, **options)
    return contextlib.closing(client)


@pytest.fixture
def client():
    with client_of() as made:
        yield made


def read(client, url):
    into = bytearray(len(CONTENT))
    client.endpoint(url).read_into(PART, memoryview(into))
    return bytes(into)


def problem(client, url):
    """Why nothing can be read there; empty if it can."""
    try:
        read(client, url)
    except source.ReadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_peer", [False, True])
def test_a_source_reads_files_and_their_first_bytes_in_many_threads(
    root, url, client, is_peer
):
    files = {
        "state/params/w/c/0/1": RANDOM,
        "state/a%2Fb [0]/c/0": b"quoted once already",
        "data/shards-00000-00063.json": b"{}",
        "data/empty": b"",
    }
    served.save(root, 30, files)
    tier = ram_disk.RamDisk(root, run=served.RUN)
    tier = peer.Peer(url, client, served.RUN) if is_peer else tier
    ((_, files_of_step),) = tier.offers(30).copies

    def read(file, num_bytes):
        leaf, content = served.leaf_of(file), files.get(file, b"")
        into, pieces = bytearray(num_bytes), bytearray()
        whole, memory = boxes.whole(leaf.shape), memoryview(into)
        size = files_of_step.read_into(leaf, whole, memory, pieces.extend)
        assert (pieces, size) == (into, len(content))
        assert into == content[:num_bytes]

    for file, content in files.items():
        read(file, len(content))
    # What is not there is an error, and others can be read after it.
    short = ("data/shards-00000-00063.json", 3)
    for file, num_bytes in (("data/none", 0), ("data/none", 1), ("state", 1), short):
        with pytest.raises(source.ReadError):
            read(file, num_bytes)
        read("data/shards-00000-00063.json", 2)
    with concurrent.futures.ThreadPoolExecutor(16) as executor:
        sizes = [1, 2**20, 2**21 + 17, *(len(RANDOM) // n for n in range(1, 41))]
        list(executor.map(read, itertools.repeat("state/params/w/c/0/1"), sizes))


def test_a_peer_offers_what_its_manifests_say_and_reads_again_what_changed(
    root, url, client
):
    tier = peer.Peer(url, client, served.RUN)
    other = {"data/part": b"other"}
    held = {"0": FILES, "1": other}
    for slot in held:
        served.save(root, 40, held[slot], slot=slot)
    assert steps_of(tier) == [30, 40]
    offered = tier.offers(40)
    assert offered.problems == []
    by_slot = {each.manifest.host.id[-1]: each for each in offered.copies}
    for slot, files in held.items():
        expected = served.manifest_of(40, files, slot=slot).at("local", url)
        assert by_slot[slot].manifest.to_bytes() == expected.to_bytes()
    into, leaf = bytearray(5), served.leaf_of("data/part", b"other")
    by_slot["1"].source.read_into(leaf, boxes.whole(leaf.shape), memoryview(into))
    assert into == b"other"

    def known():
        peer.Peer(url, client, served.RUN).offers(40)
        there = client.endpoint(url).manifests.items()
        return {listed.path[0]: manifest for listed, manifest in there}

    before = known()
    served.save(root, 40, {**FILES, "data/more": b"copy"}, slot="0")
    after = known()
    assert after["1"] is before["1"]
    assert [len(each["0"].contents.files) for each in (before, after)] == [1, 2]


def test_a_manifest_that_is_no_good_is_a_problem_beside_the_others(
    root, url, client, monkeypatch
):
    name = f"manifest-{served.MACHINE}.1"
    for step, run in ((40, "other"), (51, served.RUN)):
        served.save(root, step, FILES, slot="1", run=run)
    (root / "hosts/1/51-0").rename(root / "hosts/1/50-0")
    moved = served.save(root, 60, FILES, slot="1")
    (moved / name).rename(moved / "manifest-a")
    altered = served.save(root, 70, FILES, slot="1") / name
    altered.write_bytes(altered.read_bytes().replace(b"run-7", b"run-8"))
    later = served.save(root, 80, FILES, slot="1") / name
    later.write_bytes(checked_blobs.to_bytes({}, [], version=2))
    for step, why in {
        40: f"/40-0/{name} of {url} is that of run, step and file",
        50: f"/50-0/{name} of {url} is that of run, step and file",
        60: f"/60-0/manifest-a of {url} is that of run, step and file",
        70: "or altered",
        80: "later version",
    }.items():
        served.save(root, step, FILES)
        offered = peer.Peer(url, client, served.RUN).offers(step)
        (there,) = offered.copies
        assert there.manifest.host.id == f"{served.MACHINE}.0"
        (problem,) = offered.problems
        assert problem.startswith(f"manifest 1/{step}-0/manifest-")
        assert why in problem
    # A giant is not read.
    monkeypatch.setattr(peer, "MOST_MANIFEST_BYTES", 100)
    copies, (problem,) = peer.Peer(url, client, served.RUN).offers(30)
    assert copies == []
    assert "at most 100 are taken" in problem


def test_a_list_or_a_manifest_that_is_none_is_a_problem(client):
    path = "0/30-0/manifest-a"
    listings = [b"", b"\xff", b"{}x", b"7", b"[7]", b"{}", b'{"a": 1}', b"[" * 10**5]
    listings.append(b'{"machine": "m", "manifests": [["' + b"9" * 5000 + b'"]]}')
    for wrong in (
        *([], [path], [path, 1, "x"], [7, 1, 1.0], [path, None, 1.0]),
        *(["0/30/m", 1, 1.0], ["0/-1-0/m", 1, 1.0], ["a/0/30-0/m", 1, 1.0]),
    ):
        listings.append(json.dumps({"machine": "m", "manifests": [wrong]}).encode())
    for listing in listings:
        respond = lambda c, _, body=listing: c.sendall(answer(body))  # noqa: E731
        with ScriptedPeer(respond) as lying:
            tier = peer.Peer(lying.url, client, served.RUN)
            assert steps_of(tier) == []
            copies, (problem,) = tier.offers(30)
        assert copies == []
        assert "the list of steps cannot be read" in problem

    def nested(connection, request):
        listing = {"machine": "m", "manifests": [[path, 1, 1.0]]}
        is_list = request.startswith(b"GET /steps ")
        body = json.dumps(listing).encode() if is_list else b"[" * 10**6
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
    b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 10**5,
    b"HTTP/1.1 200 OK\r\n" + b"HTTP/1.1 200 " * 10**5,
    answer(b"[]", status=f"206 {SECRET}", headers=[f"Content-Range: {SECRET}"]),
    SECRET.encode() + b"\r\n" + answer(b"[]", headers=[f"X: {SECRET}"]),
    answer(b"", status="204 Nothing"),
    answer(b"", status="302 There", headers=["Location: http://127.0.0.1:9/"]),
    answer(b"", status="304 As before"),
    answer(b"no", status="401 Who"),
    answer(b"", status="404 Nowhere"),
    answer(b"", status="503 Later"),
]


def test_a_wrong_answer_is_a_read_error(client):
    for response in LIES:
        respond = lambda c, _, body=response: c.sendall(body)  # noqa: E731
        with ScriptedPeer(respond) as lying:
            why = problem(client, lying.url)
            assert lying.url in why, response
            # What it says does not carry the secret into messages.
            assert SECRET not in why
            assert len(lying.requests) == 1, response


@hypothesis.given(
    response=st.binary(max_size=300)
    | st.binary(max_size=300).map(lambda rest: b"HTTP/1.1 206 OK\r\n" + rest)
)
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_any_answer_is_a_read_error(client, response):
    def respond(connection, _):
        connection.sendall(response)
        connection.shutdown(2)

    with ScriptedPeer(respond) as lying:
        assert lying.url in problem(client, lying.url)


def test_a_peer_that_is_silent_or_gone_costs_its_time_once_and_is_then_left_alone():
    with (
        ScriptedPeer(lambda *_: None) as silent,
        client_of(timeout_secs=0.5) as hasty,
    ):
        assert "timed out" in problem(hasty, silent.url)
        for _ in range(3):
            assert "is left alone for" in problem(hasty, silent.url)
        assert silent.num_connections == 1
    with client_of() as client:
        for why in ("refused", "is left alone for"):
            assert why in problem(client, silent.url)


def test_a_transfer_goes_on_where_it_broke_while_there_is_progress(client):
    def cut(connection, request):
        first, last = wanted_range(request)
        headers = [f"Content-Range: bytes {first}-{last}/{len(CONTENT)}"]
        response = answer(CONTENT[first : last + 1], status="206 OK", headers=headers)
        connection.sendall(response[: 2**20 + 2**19])
        connection.shutdown(2)

    with ScriptedPeer(cut) as breaking:
        assert read(client, breaking.url) == CONTENT
        asked = [wanted_range(request)[0] for request in breaking.requests]
    # No byte is asked for again that came.
    assert [number // 2**20 for number in asked] == [0, 1, 2]
    with ScriptedPeer(lambda connection, _: connection.shutdown(2)) as breaking:
        assert problem(client, breaking.url)
        assert len(breaking.requests) == 1 + len(peer_client.RETRY_SECS)


def test_connections_are_kept_until_the_peer_closes_them(client):
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


def test_an_agent_that_ends_and_is_started_again_is_gone_on_with(service, monkeypatch):
    # As long as it takes.
    monkeypatch.setattr(peer_client, "RETRY_SECS", (0.0, *[0.1] * 600))
    into = bytearray(len(CONTENT))
    with (
        client_of(max_bytes_per_sec=2**23) as slow,
        concurrent.futures.ThreadPoolExecutor(1) as executor,
    ):
        with served.serving(service) as address:
            endpoint = slow.endpoint(address.url)
            reading = executor.submit(endpoint.read_into, PART, memoryview(into))
            while into[2**20 + 255] == 0:
                assert not reading.done()
        assert not reading.done()
        port = urllib.parse.urlsplit(address.url).port
        with served.serving(dataclasses.replace(service, port=port)):
            reading.result()
    assert into == CONTENT


def test_the_secret_may_be_another_one_later(root, url):
    known = iter([SECRET, "wrong", "agreed-by-the-new-world"])
    with client_of(lambda: next(known)) as client:
        assert read(client, url) == CONTENT
        assert "does not take the run's secret" in problem(client, url)
        secret.adopt(root, "agreed-by-the-new-world")
        assert read(client, url) == CONTENT


def test_proxies_of_the_environment_are_ignored(url, client, monkeypatch):
    with ScriptedPeer(lambda *_: None) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert read(client, url) == CONTENT
        assert proxy.num_connections == 0


@hypothesis.given(
    takes=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10)), min_size=1)
)
def test_over_any_time_no_more_passes_than_the_bound_and_a_burst(takes):
    now, passed = 0.0, []
    bound = peer_client.Bandwidth(1000, clock=lambda: now)
    for num_bytes, idle_secs in takes:
        passed.append((now, num_bytes))
        now += bound.take(num_bytes) + idle_secs
    for first, last in itertools.combinations_with_replacement(range(len(takes)), 2):
        (began, _), (ended, most) = passed[first], passed[last]
        total = sum(num_bytes for _, num_bytes in passed[first : last + 1])
        assert total <= 1000 * (ended - began) * (1 + 1e-9) + 126 + most


def test_many_peers_are_one_tier_and_a_broken_one_is_asked_once(
    root, url, tmp_path, client
):
    served.save(root, 40, FILES, slot="1")
    other = tmp_path / "other"
    secret.adopt(other, SECRET)
    for step in (20, 30):
        served.save(other, step, FILES, slot="2")
    with (
        served.serving(agent.Service(root=str(other))) as address,
        ScriptedPeer(lambda c, _: c.sendall(b"?\r\n")) as broken,
    ):
        urls = (url, broken.url, address.url)
        peers = [peer.Peer(each, client, served.RUN) for each in urls]
        assert {each.step for each in find.saves(peers)} == {20, 30, 40}
        for _ in range(3):
            copies, (problem,) = find.offered(peers, 30)
            assert {each.host.id[-1] for each, _ in copies} == {"0", "2"}
            assert f"the list of steps cannot be read: {broken.url}" in problem
        assert broken.num_connections == 1


def test_an_agent_with_tls_is_read_by_its_authority_and_its_name_alone(root, tmp_path):
    for name in ("ca", "other"):
        ca = trustme.CA()
        ca.cert_pem.write_to_path(tmp_path / f"{name}.pem")
        for host in ("127.0.0.1", "elsewhere.example"):
            issued = ca.issue_cert(host).private_key_and_cert_chain_pem
            issued.write_to_path(tmp_path / f"{name}-{host}.pem")
    ours, other = (tmp_path / name for name in ("ca.pem", "other.pem"))
    for host, authority, why in (
        ("127.0.0.1", other, "certificate verify failed"),
        ("127.0.0.1", None, "certificate verify failed"),
        ("elsewhere.example", ours, "certificate verify failed"),
        ("127.0.0.1", ours, ""),
    ):
        file = str(tmp_path / f"ca-{host}.pem")
        service = agent.Service(root=str(root), tls_certificate=file, tls_key=file)
        with served.serving(service) as address, client_of(tls_ca=authority) as client:
            assert address.url.startswith("https://")
            if why:
                assert why in problem(client, address.url)
            else:
                assert read(client, address.url) == CONTENT
    # With TLS on one side alone nothing is told.
    with served.serving(service) as address, client_of() as client:
        assert problem(client, address.url.replace("https", "http"))
    with ScriptedPeer(lambda *_: None) as plain, client_of(tls_ca=ours) as client:
        assert "does not encrypt" in problem(client, plain.url)
        assert plain.num_connections == 0
