"""A host of a MaxText run, which notes the rows of every batch that it gets.

    python -m tests.maxtext.recorded_run PORT NUM_HOSTS HOST RECORD ARGS...

ARGS are those of `elastic-ckpt maxtext`. RECORD gets a line of JSON for each batch: of
what, and the digest of each row that this host holds, by its number in the batch.
"""

import hashlib
import json
import sys

import jax
import numpy as np

from elastic_ckpt.cli import main
from elastic_ckpt.integrations import maxtext


def row_digests(batch):
    """The digest of each row held here, over the bytes of every feature."""
    assert all(array.dtype == np.int32 for array in batch.values())
    found = {}
    for name in sorted(batch):
        for shard in batch[name].addressable_shards:
            begin, _, _ = shard.index[0].indices(len(batch[name]))
            for offset, row in enumerate(np.asarray(shard.data)):
                digest = found.setdefault(begin + offset, hashlib.blake2b())
                digest.update(name.encode() + row.tobytes())
    return {row: digest.hexdigest()[:32] for row, digest in sorted(found.items())}


def note_batches(path):
    """Has every iterator that MaxText gets write down its batches."""
    record = open(path, "a")  # noqa: SIM115
    make, draw = maxtext.Taken._iterator, maxtext.MaxTextIterator.__next__

    def named(self, seam, *arguments, **placement):
        made = make(self, seam, *arguments, **placement)
        made.noted_as = "eval" if seam is maxtext.MAKE_EVAL else "train"
        return made

    def noted(self):
        batch = draw(self)
        line = {"of": self.noted_as, "rows": row_digests(batch)}
        record.write(json.dumps(line) + "\n")
        record.flush()
        return batch

    maxtext.Taken._iterator = named
    maxtext.MaxTextIterator.__next__ = noted


def run():
    port, num_hosts, host, record, *arguments = sys.argv[1:]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if int(num_hosts) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # MaxText does not start JAX again; on CPU it would take one port for all runs.
        jax.distributed.initialize(
            f"127.0.0.1:{port}", num_processes=int(num_hosts), process_id=int(host)
        )
    note_batches(record)
    return main.main(["maxtext", *arguments])


if __name__ == "__main__":
    sys.exit(run())
