"""A state that fits into a host once is saved and restored there.

    python -m tests.checkpoint.test_limited_memory save|restore TIER DIRECTORY GIB EXTRA

saves or restores a large state in `ram` or `storage`. `RLIMIT_DATA` is what the process
has once it has saved and loaded a small step, and has the state, and `EXTRA` MiB. Files
of a RAM disk that are mapped do not count.
"""

import contextlib
import os
import pathlib
import re
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import elastic_ckpt as ec
from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.cli import main as cli
from elastic_ckpt.core import errors
from elastic_ckpt.inspect import tier_locations, verification
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier, records
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.universal import opening
from tests import shared_memory

NAMES = [f"w{number:02}" for number in range(20)]


@jax.jit
def made(number, positions):
    return (positions * jnp.uint32(2654435761) + number).astype(jnp.float32)


def leaf(number, size):
    return made(jnp.uint32(number), jnp.arange(size, dtype=jnp.uint32))


def limit(extra_bytes):
    """Limits the memory of this process to what it has, and some more."""
    status = pathlib.Path("/proc/self/status").read_text()
    has_kib = int(status.partition("VmData:")[2].split()[0])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (has_kib * 2**10 + extra_bytes, hard))


def main(what, tier, directory, gib, extra_mib):
    """Saves step 2, or restores it and compares its values."""
    of_kind = {"ram": ec.Local, "storage": ec.Persistent}[tier]
    size = int(float(gib) * 2**30) // 4 // len(NAMES)
    extra_bytes = int(extra_mib) * 2**20
    with ec.Checkpointer([of_kind(directory, every=1)]) as checkpointer:
        if what == "save":
            checkpointer.save(0, {"small": np.arange(3)})
            checkpointer.wait()
            state = {name: leaf(number, size) for number, name in enumerate(NAMES)}
            jax.block_until_ready(state)
            limit(extra_bytes)
            assert checkpointer.save(2, state)
            checkpointer.wait()
            return
        # What a program needs for its first values.
        jax.block_until_ready(leaf(0, 8))
        limit(4 * size * len(NAMES) + extra_bytes)
        device = SingleDeviceSharding(jax.devices()[0])
        wanted = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=device)
        state = checkpointer.load(2, dict.fromkeys(NAMES, wanted))
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        for number, name in enumerate(NAMES):
            assert jnp.array_equal(state[name], leaf(number, size)), name


def run(*arguments):
    command = [sys.executable, "-m", "tests.checkpoint.test_limited_memory"]
    return subprocess.run(
        [*command, *map(str, arguments)], check=False, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["ram", "storage"])
def test_a_save_needs_512_mib_and_a_restore_1_gib(tmp_path, tier):
    with shared_memory.directory("limited_memory") as ram:
        directory = ram if tier == "ram" else tmp_path
        for what, extra_mib in (("save", 512), ("restore", 1024)):
            done = run(what, tier, directory, 4, extra_mib)
            assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_limit_is_one(tmp_path):
    # A state of 768 MiB does not come back into 256 MiB.
    assert run("save", "storage", tmp_path, 0.75, 512).returncode == 0
    assert run("restore", "storage", tmp_path, 0.75, -512).returncode != 0


@pytest.fixture
def directory_with_few_files():
    """A directory, where this process may open 128 more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 128 + len(os.listdir("/proc/self/fd"))
    with shared_memory.directory("few_files") as directory:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        yield directory
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_leaves_need_few_files_in_all_tiers(directory_with_few_files):
    directory = directory_with_few_files
    ram, stored, secret = (f"{directory}/{n}" for n in ("ram", "stored", "ram/secret"))
    state = {f"w{number}": leaf(number, 24 * 2**10) for number in range(2000)}
    own = [ec.Local(ram, every=1), ec.Persistent(stored, every=1)]
    with ec.Checkpointer(own, run="run-7") as checkpointer:
        assert checkpointer.save(1, state)
        checkpointer.wait()
    with contextlib.closing(agent.AgentProcess(agent.Service(root=ram))) as process:
        peers = ec.Peers(known=(process.address.url,), secret_file=secret)
        for near, tiers in (
            ("local", own[:1]),
            ("distant", [ec.Local(f"{directory}/other", every=1), peers]),
            ("persistent", own[1:]),
        ):
            with ec.Checkpointer(tiers, run="run-7") as checkpointer:
                restored = checkpointer.load(1, state)
            for name in state:
                assert jnp.array_equal(restored[name], state[name]), (near, name)
    assert not cli.main(["convert", f"{stored}/1", f"{directory}/converted/0"])
    root = persistent_root.PersistentRoot.from_path(stored)
    stored_tier = persistent_tier.PersistentTier(root, run="run-7")
    both = ram_disk.RamDisk(ram, run="run-7"), stored_tier
    readers = [VerifiedReader(find.search([tier]).newest().found) for tier in both]
    with tier_locations.opened([ram, stored]) as (_, locations):
        assert locations.known == [1]
    for look in (
        lambda: [bytes(reader.values(0)) for reader in readers],
        lambda: len(both[0].offers(1).held),
        lambda: len(both[1].offers(1).held),
        lambda: ram_disk.used_bytes(ram) > 2**20,
        lambda: [tier_locations.find_run(path) for path in (ram, stored)],
        lambda: verification.verify(locations, [1], progress=lambda *_: None).problems,
        lambda: len(opening.open_checkpoint(f"{stored}/1").tensors),
    ):
        expected = look()
        for spare in range(3):
            with contextlib.ExitStack() as stack:
                kept = [os.dup(0) for _ in range(spare)]
                with contextlib.suppress(OSError):
                    while True:
                        stack.callback(os.close, os.dup(0))
                any(map(os.close, kept))
                try:
                    found = look()
                except (errors.OpenFilesError, records.OutOfReachError, OSError) as why:
                    found = re.search("no more files|Too many open files", str(why))
            # Not that there is nothing, or that it is damaged.
            assert isinstance(found, re.Match) or (spare and found == expected)
    assert not any(reader.bad for reader in readers)


if __name__ == "__main__":
    main(*sys.argv[1:])
