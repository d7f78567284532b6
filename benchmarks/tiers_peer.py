"""A client process of suite `tiers`: reads a file from an agent in several ways.

    python -m benchmarks.tiers_peer URL SECRET_FILE PATH BYTES ROUNDS

It prints the seconds that each way took in each round, as JSON. All but TensorStore,
which returns new memory, write into memory that was written before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import tensorstore as ts

from elastic_ckpt.core import host_memory
from elastic_ckpt.tiers.peers import peer_client, secret


def measure(
    url: str, secret_file: str, path: str, num_bytes: int, rounds: int
) -> dict[str, list[float]]:
    """Secs that each way took to read a file, by way; the first round is not counted.

    Args:
      url: of the agent.
      secret_file: of the run.
      path: that the agent serves.
      num_bytes: of the file.
      rounds: of all ways.
    """
    memory = host_memory.allocate(num_bytes)
    memory[:] = 0
    known = secret.read(secret_file)
    client = peer_client.PeerClient(known)
    store = ts.KvStore.open(
        {
            "driver": "http",
            "base_url": url,
            "headers": [f"Authorization: Bearer {known}"],
        }
    ).result()

    def read_ours() -> None:
        client.endpoint(url).read_into(path, 0, memory.data)

    def read_tensorstore() -> None:
        content = store.read(path.removeprefix("/")).result()
        assert len(content.value) == num_bytes

    def read_curl() -> None:
        # The secret is not for the command line.
        subprocess.run(
            [
                *("curl", "--silent", "--fail", "--config", "-"),
                *("--output", "/dev/null", "--range", f"0-{num_bytes - 1}"),
                url + path,
            ],
            input=f'header = "Authorization: Bearer {known}"'.encode(),
            check=True,
        )

    ways: dict[str, Callable[[], None]] = {
        "client": read_ours,
        "curl": read_curl,
        "tensorstore": read_tensorstore,
    }
    secs: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, read in ways.items():
            began = time.perf_counter()
            read()
            if number:
                secs[way].append(time.perf_counter() - began)
    client.close()
    return secs


if __name__ == "__main__":
    given_url, given_secret, given_path, *counts = sys.argv[1:]
    samples = measure(given_url, given_secret, given_path, *map(int, counts))
    print(json.dumps(samples))
