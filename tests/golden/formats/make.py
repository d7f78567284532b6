"""Makes the fixtures here: a checkpoint of each format, by the program that had it.

    uv run --group dev python tests/golden/formats/make.py [NAME ...]

For each name it checks the commit out into a temporary directory, starts two hosts
there under `jax.distributed`, and packs the files that they leave as `<name>.tar.xz`.
The commits have to be in the history of the repository.
"""

import os
import pathlib
import socket
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).parent
HOSTS = 2
# By name: the commit that ran, and what a host does.
FIXTURES = {
    "orbax_positional": ("5e5557e", "orbax"),
    "orbax_sharded": ("98ed72a", "orbax"),
    "orbax_elastic_data": ("5818f18", "orbax"),
    "first_tiers": ("36d6415", "tiers"),
    "metrics_in_manifests": ("1731ae4", "tiers"),
    "lines": ("7ecbd19", "line"),
    "trees": ("b293236", "line"),
    "storage_alone": ("1e1d8e7", "storage"),
    "due": ("02db01e", "due"),
    "worlds": ("b056ea8", "worlds"),
    "before_components": ("e0fd623", "worlds"),
    "before_calls": ("c491174", "worlds"),
}
# Machines' own files, which a later world makes anew.
LEFT_OUT = {"secret", "agents.json", "agent.json", "agent.lock", "world.json"}


def main(names):
    for name in names or FIXTURES:
        commit, _ = FIXTURES[name]
        with tempfile.TemporaryDirectory(prefix="formats") as scratch:
            tree, out = pathlib.Path(scratch, "tree"), pathlib.Path(scratch, "out")
            out.mkdir()
            git = ["git", "-C", str(HERE)]
            subprocess.run(
                [*git, "worktree", "add", "--detach", "--quiet", str(tree), commit],
                check=True,
            )
            try:
                run_hosts(name, tree, out)
            finally:
                subprocess.run(
                    [*git, "worktree", "remove", "--force", str(tree)], check=True
                )
            pack(out, HERE / f"{name}.tar.xz")


def write_corpus(path):
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for number in range(40):
        writer.write(f"text {number}".encode())
    writer.close()


def run_hosts(name, tree, out):
    write_corpus(out / "texts.array_record")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    hosts = [
        subprocess.Popen(
            [sys.executable, __file__, "--host", str(host), str(port), name],
            cwd=out,
            env={
                **os.environ,
                "PYTHONPATH": f"{tree}:{tree / 'sidecar'}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "JAX_PLATFORMS": "cpu",
            },
        )
        for host in range(HOSTS)
    ]
    codes = [host.wait(timeout=300) for host in hosts]
    assert codes == [0] * HOSTS, codes


def pack(out, archive):
    def kept(info):
        base = os.path.basename(info.name)
        if base in LEFT_OUT or not (info.isreg() or info.isdir()):
            return None
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(out.iterdir()):
            tar.add(path, path.name, filter=kept)
    print(archive.name, archive.stat().st_size)


# All below runs in a host, under the program of the commit.


def host(number, port, name):
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", HOSTS, number)
    commit, kind = FIXTURES[name]
    del commit
    {
        "orbax": save_by_orbax,
        "tiers": save_to_tiers,
        "line": save_two_lines,
        "storage": save_to_storage,
        "due": save_what_is_due,
        "worlds": save_in_worlds,
    }[kind](name)


def parts(name, mesh):
    """The batches that a run saves, of each engine that was there."""
    import grain
    import numpy as np

    from elastic_ckpt import data as ec_data

    corpus = "texts.array_record"
    # First light had no names in the room itself.
    from elastic_ckpt.data import iterator, positional_data

    batches = {
        "data": iterator.Batches(
            positional_data.PositionalData(
                files=(corpus,), max_target_length=8, shuffle_seed=7, num_threads=0
            ),
            mesh=mesh,
            global_batch_size=4,
        )
    }
    if name != "orbax_positional":

        def make_shard(shard):
            numbers = grain.MapDataset.range(shard, 400, 6).seed(shard).shuffle()
            numbers = numbers.map(lambda n: {"number": np.array([n])})
            return numbers.repeat().to_iter_dataset()

        batches["shards"] = iterator.Batches(
            ec_data.sharded(make_shard, num_shards=6, pipeline="numbers, version 1"),
            mesh=mesh,
            global_batch_size=4,
        )
    return batches


def state(mesh, step):
    """The state after `step` steps: a matrix, in rows on the hosts, and small ones."""
    import jax
    import ml_dtypes
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    def array(values, spec):
        return jax.make_array_from_callback(
            values.shape, NamedSharding(mesh, spec), lambda index: values[index]
        )

    spec = PartitionSpec(mesh.axis_names[0])
    whole = np.random.default_rng(step).standard_normal((8, 4), np.float32)
    return {
        "params": {
            "w": array(whole, spec),
            "b": array(np.arange(5).astype(ml_dtypes.bfloat16) + step, PartitionSpec()),
        },
        "step": array(np.int32(step), PartitionSpec()),
    }


def mesh_of_all():
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


def taken(batches, count):
    for _ in range(count):
        for each in batches.values():
            next(each)
    return batches


def save(checkpointer, mesh, batches, step, **options):
    """Saves what two batches a step have led to."""
    taken(batches, 2)
    saved = {"state": state(mesh, step), **batches}
    assert checkpointer.save_checkpointables(step, saved, **options)


def save_by_orbax(name):
    from etils import epath
    from orbax.checkpoint import v1 as ocp

    mesh = mesh_of_all()
    batches = parts(name, mesh)
    with ocp.training.Checkpointer(epath.Path("steps").absolute()) as checkpointer:
        for step in (1, 2):
            save(checkpointer, mesh, batches, step)


def tiers(**storage):
    from elastic_ckpt.tiers import choices

    return [
        choices.Local(os.path.abspath("ram")),
        choices.Persistent(os.path.abspath("steps"), **(storage or {"every": 1})),
    ]


def save_to_tiers(name, **options):
    from elastic_ckpt.checkpoint import factory

    mesh = mesh_of_all()
    batches = parts(name, mesh)
    metrics = {} if name == "first_tiers" else {"metrics": {"loss": 2.5}}
    with factory.Checkpointer(tiers(), run="old", **options) as checkpointer:
        for step in (1, 2):
            save(checkpointer, mesh, batches, step, **metrics)
            checkpointer.wait()


def save_two_lines(name):
    """Steps 1 to 3, back to step 1, and step 2 of another line."""
    from elastic_ckpt.checkpoint import factory

    mesh = mesh_of_all()
    batches = parts(name, mesh)
    with factory.Checkpointer(tiers(), run="old") as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, mesh, batches, step)
            checkpointer.wait()
    with factory.Checkpointer(tiers(), run="old") as checkpointer:
        checkpointer.load_checkpointables(1, {"state": state(mesh, 0), **batches})
        save(checkpointer, mesh, batches, 2)
        checkpointer.wait()


def save_to_storage(name):
    from elastic_ckpt.checkpoint import factory

    mesh = mesh_of_all()
    batches = parts(name, mesh)
    with factory.Checkpointer(tiers()[1:], run="old") as checkpointer:
        for step in (1, 2):
            save(checkpointer, mesh, batches, step)
            checkpointer.wait()


def save_what_is_due(name):
    """Step 2 is due in storage when the world ends, and left to the next one."""
    from elastic_ckpt.checkpoint import factory, run_world

    mesh = mesh_of_all()
    batches = parts(name, mesh)
    with factory.Checkpointer(tiers(), run="old") as checkpointer:
        save(checkpointer, mesh, batches, 1)
        checkpointer.wait()
    left = run_world.RunWorld(is_left=lambda: True)
    with factory.Checkpointer(tiers(), run="old", world=left) as checkpointer:
        save(checkpointer, mesh, batches, 2)


def save_in_worlds(name):
    """Each of two worlds is claimed, and saves one step."""
    from elastic_ckpt.checkpoint import factory, run_world
    from elastic_ckpt.tiers.persistent.claims import Claimant

    mesh = mesh_of_all()
    batches = parts(name, mesh)
    for number, step in ((1, 1), (2, 2)):
        world = run_world.RunWorld(number=number, claimant=Claimant(name="fixture"))
        with factory.Checkpointer(tiers(), run="old", world=world) as checkpointer:
            checkpointer.claim_world()
            save(checkpointer, mesh, batches, step)
            checkpointer.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--host"]:
        host(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(sys.argv[1:])
