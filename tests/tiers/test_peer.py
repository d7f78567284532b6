import concurrent.futures
import contextlib
import itertools
import json
import shutil
import threading

import hypothesis
import numpy as np
import pytest
import trustme
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, checked_blobs, storage
from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers import choices, find, source
from elastic_ckpt.tiers.peers import agent, agent_server, peer, peer_client, secret
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served
from tests.tiers.scripted_peer import ScriptedPeer, answer, wanted_range
from tests.tiers.served import PART
from tests.tiers.tiered_steps import steps_of

SECRET = "the-secret-of-this-run"
CONTENT = bytes(range(256)) * 2**14
FILES = {"data/part": CONTENT}
SAVED = b"what was saved" * 1000
RANDOM = np.random.default_rng(7).bytes(3 * 2**20 + 17)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(agent_server, "MOST_FILE_BYTES", len(CONTENT))
    # As many attempts as there are, without the time between.
    monkeypatch.setattr(peer_client, "RETRY_SECS", (0.0,) * len(peer_client.RETRY_SECS))


@pytest.fixture
def root(tmp_path):
    secret.adopt(tmp_path, SECRET)
    (tmp_path / machine.FILE).write_text(served.MACHINE)
    served.save(tmp_path, 30, FILES)
    return tmp_path


@pytest.fixture
def url(root):
    with served.serving(agent.Service(root=str(root))) as address:
        yield address.url


# No test of anything else waits for a peer, however busy the machine is.
def client_of(*, timeout_secs=600, tls_ca=None):
    client = peer_client.PeerClient(SECRET, timeout_secs=timeout_secs, tls_ca=tls_ca)
    return contextlib.closing(client)


@pytest.fixture
def client():
    with client_of() as made:
        yield made


def read(client, url):
    into = bytearray(len(CONTENT))
    client.endpoint(url).read_into(PART, memoryview(into))
    return bytes(into)


def problem(client, url, act=read):
    """Why nothing can be read there, or put; empty if it can."""
    try:
        act(client, url)
    except (source.ReadError, source.RepairError) as error:
        return str(error)
    return ""


def test_files_and_their_first_bytes_are_read_in_many_threads(root, url, client):
    files = {
        "state/params/w/c/0/1": RANDOM,
        "state/a%2Fb [0]/c/0": b"quoted once already",
        "data/short": b"{}",
        "data/empty": b"",
    }
    served.save(root, 30, files)
    ((_, files_of_step),) = peer.Peer(url, client, served.RUN).offers(30).held

    def read(file, num_bytes):
        leaf, content = manifest.Leaf.of_file(file, 0), files.get(file, b"")
        into, pieces = bytearray(num_bytes), bytearray()
        box, memory = boxes.whole(leaf.shape), memoryview(into)
        size = files_of_step.read_into(leaf, box, memory, pieces.extend)
        assert (into, pieces, size) == (content[:num_bytes], into, len(content))

    for file, content in files.items():
        read(file, len(content))
    # What is not there is an error, and others can be read after it.
    refused = {"data/none": 0, "data/no": 1, "state": 1, "data/short": 3}
    for file, size in refused.items():
        with pytest.raises(source.ReadError):
            read(file, size)
        read("data/short", 2)
    with concurrent.futures.ThreadPoolExecutor(16) as executor:
        sizes = [1, 2**20, 2**21 + 17, *(len(RANDOM) // n for n in range(1, 41))]
        list(executor.map(read, itertools.repeat("state/params/w/c/0/1"), sizes))


def test_a_peer_offers_its_manifests_and_reads_changed_ones_again(root, url, client):
    expected = []
    for slot, files in (("0", FILES), ("1", {"data/part": b"other"})):
        saved = served.save(root, 40, files, slot=slot)
        content = (saved / f"manifest-{served.MACHINE}.{slot}").read_bytes()
        expected.append(manifest.Manifest.parse(content).at("local", url).to_bytes())
    tier = peer.Peer(url, client, served.RUN)
    assert steps_of(tier) == [30, 40]
    copies, problems = tier.offers(40)
    assert problems == []
    assert [each.manifest.to_bytes() for each in copies] == expected

    def known():
        peer.Peer(url, client, served.RUN).offers(40)
        there = client.endpoint(url).manifests.items()
        return {listed.path[0]: held for listed, held in there}

    before = known()
    served.save(root, 40, {**FILES, "data/more": b"copy"}, slot="0")
    after = known()
    assert after["1"] is before["1"]
    assert [len(each["0"].contents.files) for each in (before, after)] == [1, 2]


def test_a_bad_manifest_is_a_problem_beside_others(root, url, client, monkeypatch):
    name = f"manifest-{served.MACHINE}.1"
    served.save(root, 40, FILES, slot="1", run="other")
    steps = (51, 60, 70, 80, 90)
    moved = [served.save(root, step, FILES, slot="1") for step in steps]
    moved[0].rename(moved[0].with_name("50-0"))
    (moved[1] / name).rename(moved[1] / "manifest-a")
    altered = (moved[2] / name).read_bytes().replace(b"run-7", b"run-8")
    (moved[2] / name).write_bytes(altered)
    (moved[3] / name).write_bytes(checked_blobs.to_bytes({}, [], version=2))
    (moved[4] / name).write_bytes(b"[" * 10**6)
    whys = dict.fromkeys((40, 50, 60), "has run, step and file")
    whys |= {70: "or altered", 80: "later version", 90: "or altered"}
    for step, why in whys.items():
        served.save(root, step, FILES)
        (there,), (problem,) = peer.Peer(url, client, served.RUN).offers(step)
        assert there.manifest.host.id == f"{served.MACHINE}.0"
        assert problem.startswith(f"manifest 1/{step}-0/manifest-")
        assert why in problem
    # A giant is not read.
    monkeypatch.setattr(peer, "MOST_MANIFEST_BYTES", 100)
    copies, (problem,) = peer.Peer(url, client, served.RUN).offers(30)
    assert copies == []
    assert "at most 100 are accepted" in problem


def test_a_list_that_is_none_is_a_problem_and_connections_are_kept(client):
    path = "0/30-0/manifest-a"
    manifests = ([], [path], [7, 1, 1.0], [path, None, 1.0], ["a/0/30-0/m", 1, 1.0])
    lists = [json.dumps({"machine": "m", "manifests": [each]}) for each in manifests]
    lists += ["", "{}x", "7", "{}", "[" * 10**5]
    lists.append('{"machine": "m", "manifests": [["' + "9" * 5000 + '"]]}')
    for text in lists:
        with ScriptedPeer(answer(text.encode())) as lying:
            tier = peer.Peer(lying.url, client, served.RUN)
            assert steps_of(tier) == []
            copies, (problem,) = tier.offers(30)
            # It is asked once.
            assert len(lying.requests) == 1
        assert copies == []
        assert f"the list of steps cannot be read: {lying.url}" in problem

    with ScriptedPeer(answer(b"[]")) as keeping:
        for _ in range(2):
            endpoint = client.endpoint(keeping.url)
            assert endpoint.read("/steps", most_bytes=2) == b"[]"
        assert len(keeping.connections) == 1


LIES = [
    answer(CONTENT),
    answer(CONTENT[:-1], status="206 OK"),
    answer(CONTENT[:9], status="206 OK", headers=["Content-Range: bytes 0-8/9"]),
    b"HTTP/1.1 206 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n",
    b"HTTP/1.1 206 OK\r\nContent-Length: " + b"9" * 30000 + b"\r\n\r\n",
    b"HTTP/1.1 999999 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 10**5,
    b"HTTP/1.1 200 OK\r\n" + b"HTTP/1.1 200 " * 10**5,
    answer(b"[]", status=f"206 {SECRET}", headers=[f"Content-Range: {SECRET}"]),
    SECRET.encode() + b"\r\n" + answer(b"[]", headers=[f"X: {SECRET}"]),
    answer(b"", status="302 There", headers=["Location: http://127.0.0.1:9/"]),
    answer(b"no", status="401 Who"),
    answer(b"", status="503 Later"),
]


def test_a_wrong_answer_is_a_read_error(client):
    for response in LIES:
        with ScriptedPeer(response) as lying:
            why = problem(client, lying.url)
            assert lying.url in why, response
            # What it says does not carry the secret into messages.
            assert SECRET not in why
            assert len(lying.requests) == 1, response


def test_a_peer_that_is_silent_or_gone_costs_its_time_once_and_is_then_left_alone():
    for act in (read, lambda client, url: client.endpoint(url).put(PART, SAVED)):
        with ScriptedPeer(b"") as silent, client_of(timeout_secs=2) as hasty:
            assert "timed out" in problem(hasty, silent.url, act)
            for again in (read, act, read):
                assert "is skipped for" in problem(hasty, silent.url, again)
            assert len(silent.connections) == 1
    with client_of() as other:
        for why in ("refused", "is skipped for"):
            assert why in problem(other, silent.url)


def test_proxies_of_the_environment_are_ignored(url, client, monkeypatch):
    with ScriptedPeer(lambda *_: None) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert read(client, url) == CONTENT
        assert not proxy.connections


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


def test_no_peer_waits_for_the_list_of_another(client):
    all_asked = threading.Barrier(3)

    def respond(connection, _):
        all_asked.wait(60)
        connection.sendall(answer(b'{"machine": "", "manifests": []}'))

    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(ScriptedPeer(respond)).url for _ in range(3)]
        peers = [peer.Peer(url, client, served.RUN) for url in urls]
        find.saves(peers)
        assert not any(each.listing().problem for each in peers)


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


def test_an_agent_with_tls_is_read_by_its_authority_and_its_name_alone(root, tmp_path):
    authority, ours = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ours)
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    failed, file = "certificate verify failed", str(tmp_path / "host.pem")
    for host, tls_ca, why in (
        ("elsewhere.example", ours, failed),
        ("127.0.0.1", tmp_path / "other.pem", failed),
        ("127.0.0.1", None, failed),
        ("127.0.0.1", ours, ""),
    ):
        issued = authority.issue_cert(host).private_key_and_cert_chain_pem
        issued.write_to_path(file)
        service = agent.Service(root=str(root), tls_certificate=file, tls_key=file)
        with served.serving(service) as address, client_of(tls_ca=tls_ca) as client:
            assert address.url.startswith("https://")
            if why:
                assert why in problem(client, address.url)
            else:
                assert read(client, address.url) == CONTENT
        tls = choices.TlsFiles(certificate=file, key=file, authority=str(ours))
        choices.Peers(known=(address.url,), tls=tls)
    # With TLS on one side alone nothing is told.
    with served.serving(service) as address, client_of() as client:
        assert problem(client, address.url.replace("https", "http"))
    with ScriptedPeer(b"") as plain, client_of(tls_ca=ours) as client:
        assert "does not encrypt" in problem(client, plain.url)
        assert not plain.connections


@pytest.fixture
def directory(root):
    """The directory of a step whose file is bad."""
    made = served.save(root, 30, {"data/part": SAVED, "data/b": b"other"})
    (made / "data" / "part").write_bytes(b"damaged")
    return made


def test_an_agent_puts_right_files_of_steps_alone(directory, url, root, client):
    part, outside = directory / "data" / "part", root / "outside"
    ((_, remote),) = peer.Peer(url, client, served.RUN).offers(30).held

    def put(file, content):
        leaf = manifest.Leaf.of_file(file, len(content))
        remote.repair(leaf, boxes.whole(leaf.shape), content)

    def refuse(why, file="data/part", content=SAVED, *, there=part, here=True):
        with pytest.raises(source.RepairError, match=why):
            put(file, content)
        # So does a program of this machine, which needs no agent.
        if here:
            with pytest.raises(source.RepairError, match=why):
                ram_disk.repair(directory, file, content)
        assert there.read_bytes() == b"damaged"

    refuse("its digest differs", content=SAVED[:-1] + b"x")
    refuse("its digest differs", content=SAVED + b"x")
    refuse("status 413", content=CONTENT + b"x", here=False)
    refuse("its manifest does not list this file", "data/new")
    refuse("does not list this file|has no such file", "../30-0/data/part")
    for path in ("/steps", "/hosts/0/30-0", "/hosts/x/30-0/data/part"):
        with pytest.raises(source.RepairError):
            client.endpoint(url).put(path, SAVED)
    secret.adopt(root, "the-secret-of-another-run")
    refuse("does not accept the run's secret", here=False)
    secret.adopt(root, SECRET)
    (directory / "data").rename(outside)
    (directory / "data").symlink_to(outside)
    refuse("behind a link", there=outside / "part")
    (directory / "data").unlink()
    outside.rename(directory / "data")
    (kept,) = directory.glob("manifest-*")
    kept.rename(outside)
    refuse(r"was not repaired.*manifest-")
    outside.rename(kept)
    put("data/part", SAVED)
    assert part.read_bytes() == SAVED
    # One that is gone is made.
    shutil.rmtree(part.parent)
    ram_disk.repair(directory, "data/part", SAVED)
    assert part.read_bytes() == SAVED


def test_a_repair_waits_while_a_process_removes_the_step(directory):
    repair = ram_disk.repair, directory, "data/part", SAVED
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        with ram_disk.repairing(directory.parent):
            repairing = executor.submit(*repair)
            assert not concurrent.futures.wait([repairing], timeout=0.2).done
            storage.remove(directory)
        with pytest.raises(source.RepairError, match="was not repaired"):
            repairing.result()
    assert not directory.exists()
