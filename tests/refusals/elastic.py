"""Mistakes in the faults of a run, and in a cluster of processes."""

import functools
import os

import elastic_ckpt as ec
from elastic_ckpt.elastic import faults, pathways
from tests.refusals import Refusal, row


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
NOT_HERE = "is not on this machine"
listed, processes = row(faults.parse), row(ec.elastic.Processes)
memory = functools.partial(processes, slices=2, run="x")

REFUSALS = {
    "faults: a word": listed(
        r"'kill_slice' is not a list .*use the form \[\{kill_slice", "kill_slice"
    ),
    "faults: no step": listed("is not a fault", '[{"kill_slice": 1, "step": 2}]'),
    "faults: no such kind": listed("burn_slice", '[{"burn_slice": 1, "at_step": 2}]'),
    "faults: no slice": listed(
        "Expected `int`, got `bool`", '[{"kill_slice": true, "at_step": 2}]'
    ),
    "processes: no slice": processes(r"slices=0\): pass a positive integer", slices=0),
    "processes: a fault of no slice": processes(
        "the run has slices 0 to 1; choose one of them",
        **{"slices": 2, "injected": [faults.Fault(kind="kill_slice", target=2)]},
    ),
    "processes: on TPUs": processes(
        r"use ec\.elastic\.Pathways", slices=2, hardware="tpu"
    ),
    "processes: memory of no run": processes("needs a run name", slices=2, ram=os.sep),
    "processes: memory that cannot be made": memory(
        r"ram='/proc/x'\): .*pass a writable dir", ram="/proc/x"
    ),
    "processes: memory in a bucket": memory(
        f"ram='gs://b/c' {NOT_HERE}", ram="gs://b/c"
    ),
    "processes: logs in a bucket": memory(
        f"logs='s3://b/c' {NOT_HERE}", logs="s3://b/c"
    ),
    "processes: a path for a name": memory("pass a valid directory name", run="a/b"),
    "processes: a function without a name": Refusal(
        unnamed_function,
        r"cannot be sent to host processes \(.*<lambda>.*; define it with `def` at the",
        writes=True,
    ),
    "machines: nothing shared": processes(
        "needs a directory that all its machines share", slices=2, machines=2
    ),
    "machines: slices that they do not divide": processes(
        "evenly among 2 machines", **{**SHARED, "slices": 3}
    ),
    "machines: no number": processes("machine is not set", **SHARED),
    "machines: a number too many": processes("from 0 to 1", **SHARED, machine=2),
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
