"""Mistakes in the faults of a run, and in a cluster of processes."""

import os

import elastic_ckpt as ec
from elastic_ckpt.elastic import faults, pathways
from tests.refusals import Refusal


def listed(text):
    return lambda _: faults.parse(text)


def processes(**values):
    return lambda _: ec.elastic.Processes(**values)


def served_elsewhere(directory):
    served = f"{directory}/slice-0/x"
    world = ec.elastic.World(
        number=1, slices=(0,), slice_name="0", ram_directory=served
    )
    storage = ec.Persistent(directory / "storage", every=1)
    world.checkpointer([ec.Local(f"{served}/x"), ec.Peers(), storage])


def hanging_pathways(_):
    hang = faults.Fault(kind=faults.Kind.HANG_HOST, target=0, at_step=1)
    pathways.Pathways(pathways.SimulatedSlices(2), injected=[hang])


def unnamed_function(directory):
    with ec.elastic.Processes(slices=2, logs=directory) as cluster:
        ec.elastic.run(lambda world: world.number, cluster=cluster)


SHARED = {"slices": 2, "machines": 2, "shared": "shared"}
RAM = {"slices": 2, "run": "x"}

REFUSALS = {
    "faults: a word": Refusal(
        listed("kill_slice"),
        r"'kill_slice' is not a list .*use the form \[\{kill_slice",
    ),
    "faults: no step": Refusal(
        listed('[{"kill_slice": 1, "step": 2}]'), "is not a fault"
    ),
    "faults: no such kind": Refusal(
        listed('[{"burn_slice": 1, "at_step": 2}]'), "burn_slice"
    ),
    "faults: no slice": Refusal(
        listed('[{"kill_slice": true, "at_step": 2}]'), "Expected `int`, got `bool`"
    ),
    "processes: no slice": Refusal(
        processes(slices=0), r"slices=0\): pass a positive integer"
    ),
    "processes: a fault of no slice": Refusal(
        processes(slices=2, injected=[faults.Fault(kind="kill_slice", target=2)]),
        "the run has slices 0 to 1; choose one of them",
    ),
    "processes: on TPUs": Refusal(
        processes(slices=2, hardware="tpu"), r"use ec\.elastic\.Pathways"
    ),
    "processes: memory of no run": Refusal(
        processes(slices=2, ram=os.sep), "needs a run name"
    ),
    "processes: memory that cannot be made": Refusal(
        processes(**RAM, ram="/proc/x"), r"ram='/proc/x'\): .*pass a writable dir"
    ),
    "processes: memory in a bucket": Refusal(
        processes(**RAM, ram="gs://b/c"), "ram='gs://b/c' is not on this machine"
    ),
    "processes: logs in a bucket": Refusal(
        processes(slices=2, logs="s3://b/c"), "logs='s3://b/c' is not on this machine"
    ),
    "processes: a path for a name": Refusal(
        processes(slices=2, run="a/b"), "pass a valid directory name"
    ),
    "processes: a function without a name": Refusal(
        unnamed_function,
        r"cannot be sent to host processes \(.*<lambda>.*; define it with `def` at the",
        writes=True,
    ),
    "machines: nothing shared": Refusal(
        processes(slices=2, machines=2), "needs a directory that all its machines share"
    ),
    "machines: slices that they do not divide": Refusal(
        processes(**{**SHARED, "slices": 3}), "evenly among 2 machines"
    ),
    "machines: no number": Refusal(processes(**SHARED), "machine is not set"),
    "machines: a number too many": Refusal(
        processes(**SHARED, machine=2), "from 0 to 1"
    ),
    "a checkpointer beside the agent": Refusal(
        served_elsewhere, "is not the directory that the agent of slice 0"
    ),
    "a fault that one process cannot have": Refusal(
        hanging_pathways, "only the process that trains"
    ),
    "slices that do not divide the devices": Refusal(
        lambda _: pathways.SimulatedSlices(3),
        "devices cannot be divided evenly among 3 slices",
    ),
}
