"""A user's loop that loses a slice and gets it back, over both clusters."""

import functools

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.elastic import faults
from tests import conftest, shared_memory
from tests.elastic import tiny_loop

FAULTS = faults.parse(
    '[{"kill_slice": 1, "at_step": 5}, {"return_slice": 1, "at_step": 9}]'
)


def of_processes(directory, ram, emit):
    return ec.elastic.Processes(
        slices=2,
        devices_per_host=4,
        ram=ram,
        run="tiny",
        logs=directory / "logs",
        injected=FAULTS,
        emit=emit,
    )


def of_pathways(directory, ram, emit):
    del directory, ram
    slices = ec.elastic.SimulatedSlices(2)
    return ec.elastic.Pathways(slices, injected=FAULTS, emit=emit)


@pytest.mark.parametrize(
    "make",
    [pytest.param(of_processes, marks=pytest.mark.slow), of_pathways],
)
def test_examples_are_those_of_one_host_though_slices_come_and_go(
    tmp_path, corpus, make
):
    check(tmp_path, corpus, make)


@pytest.mark.slow
def test_a_loop_that_counts_otherwise_than_its_checkpointer_leaves_its_world(
    tmp_path, corpus
):
    check(tmp_path, corpus, of_processes, ahead=1)


def check(tmp_path, corpus, make, *, ahead=0):
    """Runs the loop over three worlds, and compares it with one host."""
    worlds = []

    def emit(name, **fields):
        if name == "world_started":
            worlds.append(fields["slices"])

    with shared_memory.directory("loop") as ram:
        train = functools.partial(
            tiny_loop.train,
            directory=str(tmp_path),
            ram=f"{ram}/tiny",
            corpus=corpus,
            last_world=3,
            least_steps=5,
            ahead=ahead,
        )
        cluster = make(tmp_path, ram, emit)
        policy = ec.elastic.Policy(settle_secs=0)
        try:
            ec.elastic.run(train, cluster=cluster, policy=policy, emit=emit)
        finally:
            cluster.close()
    assert worlds == [[0, 1], [0], [0, 1]]
    steps = tiny_loop.steps(tmp_path)
    assert [each["step"] for each in steps] == list(range(1, len(steps) + 1))
    assert {each["world"] for each in steps} == {1, 2, 3}
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    data = conftest.data_of(corpus)
    one_host = ec.batches(data, mesh=mesh, global_batch_size=tiny_loop.ROWS)
    total = 0
    for each in steps:
        batch = next(one_host)
        total += int(batch["inputs"].sum())
        assert each["ids"] == np.asarray(batch["example_id"]).tolist()
        assert each["sum"] == total
    one_host.close()
