"""Hosts in pods of a generated manifest fail, and pods and their RAM disks stay.

The runs are in buckets, as those of the shipped manifests.
"""

import os

import pytest

from elastic_ckpt.steps import layout
from elastic_ckpt.tiers.ram import machine
from tests import runs, shared_memory
from tests.deploy import local_pods
from tests.multiprocess import test_elastic_run


def memory_of(pods, number):
    """The id of the memory of a pod's run, which a new RAM disk has another of."""
    directory = layout.slice_directory(pods.ram, number)
    return machine.find(os.path.join(directory, "tiny"))


def configured(tmp_path, corpus, ram, bucket, **settings):
    """A run of two pods that has nothing in storage before its end."""
    return test_elastic_run.configured(
        tmp_path,
        corpus,
        ram,
        base_output_directory=bucket,
        hosts=2,
        slices=2,
        steps=1_000_000,
        multi_tier_checkpointing_backup_interval_steps=1_000_000,
        elastic_machine_timeout_seconds=20,
        elastic_compile_ahead_seconds=0,
        termination_grace_period_seconds=900,
        **settings,
    )


def restores(pods):
    """How many worlds have restored a step."""
    return len(pods.events("restored_from"))


def await_next_world(pods, before):
    """Waits until more worlds of both pods have restored a step, and one trains."""
    pods.wait_until(lambda: restores(pods) > before)
    pods.train_on([0, 1])


@pytest.mark.night
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_hosts_of_the_generated_pods_fail_and_the_pods_and_their_memory_stay(
    tmp_path, corpus, bucket
):
    with shared_memory.directory("pods") as ram:
        config = configured(tmp_path, corpus, ram, bucket)
        with local_pods.Pods(config, ram) as pods:
            pods.train_on([0, 1])
            supervisors = {number: pod.pid for number, pod in pods.started.items()}
            memory = [memory_of(pods, number) for number in (0, 1)]
            # One of a pod that follows, and one of that which leads.
            for number in (1, 0):
                before = restores(pods)
                pods.kill_hosts(number)
                await_next_world(pods, before)
            now = {number: pod.pid for number, pod in pods.started.items()}
            assert now == supervisors
            assert [memory_of(pods, number) for number in (0, 1)] == memory
            # A pod is lost with its RAM disk; the Job replaces it and no other.
            before = restores(pods)
            pods.kill(1)
            pods.start(1)
            await_next_world(pods, before)
            assert memory_of(pods, 0) == memory[0]
            assert memory_of(pods, 1) != memory[1]
            pods.stop()
            restored = runs.events(pods.run, "restored_from")
            assert all(each["step"] > 0 for each in restored)
            assert all(each["persistent_bytes"] == 0 for each in restored)
            assert "PASSED" in runs.verb("audit", pods.run)


@pytest.mark.night
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_all_pods_of_hosts_are_lost_and_the_backup_pods_of_the_manifest_have_the_step(
    tmp_path, corpus, bucket
):
    secret_file = tmp_path / "secret"
    secret_file.write_text("the-secret-of-this-run\n")
    with shared_memory.directory("pods") as ram:
        config = configured(
            tmp_path,
            corpus,
            ram,
            bucket,
            peer_copies=0,
            peer_secret_file=str(secret_file),
            backup_hosts=2,
        )
        with local_pods.Pods(config, ram) as pods:
            step, _ = pods.backups[0].await_fetched()
            pods.backups[1].await_fetched(step=step)
            for number in (0, 1):
                pods.kill(number)
            for number in (0, 1):
                pods.start(number)
            pods.wait_until(lambda: pods.events("restored_from"))
            pods.stop()
            (restored,) = runs.events(pods.run, "restored_from")
            assert restored["step"] >= step
            assert restored["persistent_bytes"] == restored["local_bytes"] == 0
            assert "PASSED" in runs.verb("audit", pods.run)
