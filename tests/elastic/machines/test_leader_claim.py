"""Claims of leaders on disks, in buckets, and in buckets that fail."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from elastic_ckpt.core import clock, process
from elastic_ckpt.elastic.machines import leader_claim
from tests import faulty_buckets

# Takes the claim as a process of another machine, and renews it.
LEADS = """
import dataclasses, sys
from elastic_ckpt.core import process
from elastic_ckpt.elastic.machines import leader_claim
far = dataclasses.replace(process.this(), host="far", boot_id="another")
claims = leader_claim.LeaderClaims(sys.argv[1], machine=0, lost_secs=6, owner=far)
claims.look()
assert claims.take("10.0.0.1:7", "key", renewed_to=lambda count: None)
print("leads", flush=True)
sys.stdin.readline()
print("leads" if claims.check() else "follows", flush=True)
sys.stdin.readline()
claims.give_back()
"""
SLOW = pytest.mark.slow


@pytest.fixture(
    params=[
        pytest.param("local", marks=SLOW),
        pytest.param("gs", marks=SLOW),
        pytest.param("s3", marks=SLOW),
    ]
)
def shared(request, steps_in):
    """A directory that machines share, on a disk or in a bucket."""
    return steps_in(request.param)


def claims_of(shared, number):
    far = dataclasses.replace(process.this(), host=f"m{number}", boot_id=f"b{number}")
    return leader_claim.LeaderClaims(shared, machine=number, lost_secs=6, owner=far)


def await_free(claims):
    claims.look()
    while not claims.is_free:
        clock.sleep(0.2)
        claims.look()


def take(claims):
    return claims.take("10.0.0.2:7", "key", renewed_to=lambda _: None)


def test_a_leader_that_was_stopped_has_lost_its_claim_when_it_goes_on(shared):
    with subprocess.Popen(
        [sys.executable, "-c", LEADS, shared],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as leading:
        assert leading.stdout.readline() == "leads\n"
        second, third = claims_of(shared, 1), claims_of(shared, 2)
        second.look()
        leader = second.leader()
        assert (leader.machine, leader.address) == (0, "10.0.0.1:7")
        assert leader.claim == f"{shared}/leader/1.json"
        # It is renewed.
        while second._seen[1] < 3:
            clock.sleep(0.2)
            second.look()
        leading.send_signal(signal.SIGSTOP)
        await_free(second)
        assert second.leader().lost == "its claim was not renewed for 6 s"
        assert take(second)
        leading.send_signal(signal.SIGCONT)
        leading.stdin.write("\n")
        leading.stdin.flush()
        assert leading.stdout.readline() == "follows\n"
        leading.communicate("\n")
        # What it gives back is not its own.
        assert second.check()
        second.give_back()
        third.look()
        assert third.leader() is None
        assert take(third)
        assert third._seen[0] == 3
        third.give_back()


# Three machines take the claim in turn, and look again after each failure.
TURNS = """
import dataclasses, sys
from elastic_ckpt.core import bucket_clients, errors, process
from elastic_ckpt.elastic.machines import leader_claim
def claims_of(number):
    far = dataclasses.replace(process.this(), host=f"m{number}", boot_id=f"b{number}")
    return leader_claim.LeaderClaims(
        sys.argv[1], machine=number, lost_secs=2, owner=far
    )
machines = [claims_of(number) for number in range(3)]
def tried(act):
    while True:
        try:
            return act()
        except (errors.CheckpointError, *bucket_clients.failures()):
            pass
def take(each):
    each.look()
    return each.is_free and each.take("a:7", "key", renewed_to=print)
for _ in range(3):
    while not any(tried(lambda: take(each)) for each in machines):
        pass
    # One that was too slow to renew it may have lost it to another.
    holding = [each for each in machines if each.has_lead and tried(each.check)]
    assert len(holding) <= 1, holding
    for each in machines:
        each.give_back()
"""


@pytest.mark.slow
def test_one_of_several_gets_the_claim_of_a_bucket_that_fails(
    object_stores, bucket, monkeypatch
):
    faults = faulty_buckets.Faults(share=0.2, seed=1)
    with faulty_buckets.before(object_stores, faults) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        ended = subprocess.run(
            [sys.executable, "-c", TURNS, bucket],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert faults.happened
