"""Suite `histories`: random histories of a simulated run, as `tests/model` checks them.

Hosts, crashes, lost messages and machines are simulated in one process; the code is the
product's. A history that goes wrong ends the suite with the acts that lead to it.

* `histories_per_cpu_sec`: how many one core checks a second.
"""

from __future__ import annotations

import os
import time

from benchmarks import report

NUM_HISTORIES = 50_000


def measure(num_histories: int = NUM_HISTORIES) -> dict[str, report.Figure]:
    """Checks so many histories, each of them another."""
    # What the tests leave in memory is named after their session.
    os.environ.setdefault("ELASTIC_CKPT_TEST_SESSION", str(os.getpid()))
    from tests.model import histories

    began_secs = time.process_time()
    histories.run(num_histories, derandomize=False)
    secs = time.process_time() - began_secs
    return {
        "histories_per_cpu_sec": report.figure(
            "1/s", f"no bound; {num_histories} histories", [num_histories / secs]
        )
    }
