"""Starts the hosts of MaxText's runs: a server that has imported MaxText, and forks.

    python -m tests.maxtext.hosts

For the environment of MaxText. A line of input is a run, one of output the exit codes
of its hosts: importing takes ten seconds, and a run of several hosts needs none of it.
Beside each host's log, a file has a line for each batch that MaxText was given: of
what, and the digest of each row that this host holds, by its number in the batch.
"""

import dataclasses
import gc
import hashlib
import json
import os
import pathlib
import signal
import socket
import sys
import time
import traceback

# A run may take so long, and after a host has failed the others so much longer.
LIMIT_SECS = 3000
PATIENCE_SECS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run on some hosts of one device each.

    Attributes:
      program: `ours`, or MaxText by itself, `stock`.
      num_hosts: processes.
      directory: of the logs and batches, `HOST.log` and `HOST.jsonl`.
      arguments: MaxText's, with keys of ours for ours.
    """

    program: str
    num_hosts: int
    directory: str
    arguments: list[str]


def serve():
    # Imported modules print to the standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from elastic_ckpt.integrations import maxtext  # noqa: I001

    import maxtext.trainers.pre_train.train  # noqa: F401

    # A collection in a host would visit all that is imported, and so copy its pages.
    gc.freeze()
    for line in sys.stdin:
        run = Run(**json.loads(line))
        os.makedirs(run.directory, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        hosts: list[int] = []
        for number in range(run.num_hosts):
            pid = os.fork()
            # One group of processes, so that a host can kill them all.
            leader = hosts[0] if hosts else pid
            os.setpgid(pid, leader)
            if not pid:
                return host(run, number, port)
            hosts.append(pid)
        print(json.dumps(wait(hosts)), file=answers, flush=True)
    return 0


def wait(hosts):
    """The exit codes of the hosts, which are killed if they do not end."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT_SECS
    while len(codes) < len(hosts):
        for pid in set(hosts) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + PATIENCE_SECS)
        if time.monotonic() > deadline:
            os.killpg(hosts[0], signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in hosts]


def host(run, number, port):
    import jax

    from elastic_ckpt.cli import main

    log = os.open(
        f"{run.directory}/{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    for stream in (1, 2):
        os.dup2(log, stream)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if run.num_hosts > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # MaxText starts JAX no second time. By itself, on CPU, it takes a fixed port.
        jax.distributed.initialize(
            f"127.0.0.1:{port}", num_processes=run.num_hosts, process_id=number
        )
    note_batches(pathlib.Path(run.directory, f"{number}.jsonl"))
    if run.program == "ours":
        return main.main(["maxtext", *run.arguments])
    return stock(run.arguments)


def stock(arguments):
    from absl import app
    from maxtext.trainers.pre_train import train

    try:
        app.run(train.main, argv=[train.__file__, *arguments])
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def note_batches(path):
    """Has every batch that MaxText is given written down."""
    from elastic_ckpt.integrations import maxtext

    path.write_text("")

    def noted(kind, draw):
        def drawn(self, batches):
            batch = draw(self, batches)
            rows = row_digests({name: batch[name] for name in maxtext.FEATURES})
            with path.open("a") as record:
                record.write(json.dumps({"of": kind, "rows": rows}) + "\n")
            return batch

        return drawn

    of_training, of_evaluation = (
        maxtext.Run._next_of_training,
        maxtext.Run._next_of_evaluation,
    )
    maxtext.Run._next_of_training = noted("train", of_training)
    maxtext.Run._next_of_evaluation = noted("eval", of_evaluation)


def row_digests(batch):
    """The digest of each row held here, over the bytes of every feature."""
    import numpy as np

    hashes: dict[int, hashlib.blake2b] = {}
    for name in sorted(batch):
        assert batch[name].dtype == np.int32
        for shard in batch[name].addressable_shards:
            begin, _, _ = shard.index[0].indices(len(batch[name]))
            for offset, row in enumerate(np.asarray(shard.data)):
                digest = hashes.setdefault(begin + offset, hashlib.blake2b())
                digest.update(name.encode() + row.tobytes())
    return {row: digest.hexdigest()[:32] for row, digest in sorted(hashes.items())}


if __name__ == "__main__":
    sys.exit(serve())
