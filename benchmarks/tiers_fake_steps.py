"""Part of suite `tiers`: starts beside a peer that lists steps it does not have.

* `start_ms_beside_0_fake_steps`, `..._200_...`, `..._40000_...`: a world of one host
  that has a peer, until it has found its newest step, where the peer lists so many
  newer steps that it does not have.

    python -m benchmarks.tiers_fake_steps DIRECTORY ROUNDS [COUNT...]

prints, as JSON, the secs of each start, by the number of fake steps.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import report
from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices

# The only step that there is.
_STEP = 1
# The last is a list of nearly the most bytes that are taken.
_COUNTS = (0, 200, 40_000)


def figures(directory: str, rounds: int) -> dict[str, report.Figure]:
    """Measures in a new process; see `measure`."""
    command = [sys.executable, "-m", __name__, directory, str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {
        f"start_ms_beside_{count}_fake_steps": report.Figure(
            unit="ms",
            against="a peer lists so many",
            samples=tuple(1000 * each for each in secs),
        )
        for count, secs in json.loads(done.stdout).items()
    }


def measure(
    directory: str, rounds: int, counts: Sequence[int] = _COUNTS
) -> dict[str, list[float]]:
    """Secs of each start, by the number of fake steps; the first round is not counted.

    Args:
      directory: for the RAM disk.
      rounds: of all counts.
      counts: numbers of fake steps.
    """
    local = choices.Local(directory)
    with frontend.Checkpointer([local]) as checkpointer:
        checkpointer.save(_STEP, {"weights": np.zeros(1)})
    secs: dict[str, list[float]] = {str(count): [] for count in counts}
    with contextlib.ExitStack() as serving:
        urls = [serving.enter_context(_lying(count)) for count in counts]
        for number in range(rounds + 1):
            for count, url in zip(counts, urls, strict=True):
                began = time.perf_counter()
                with frontend.Checkpointer([local, choices.Peers(known=(url,))]) as one:
                    took = time.perf_counter() - began
                    assert one.latest is not None
                    assert one.latest.step == _STEP
                if number:
                    secs[str(count)].append(took)
    return secs


@contextlib.contextmanager
def _lying(count: int) -> Iterator[str]:
    # The url of a peer that lists so many steps.
    entries = [
        {"slot": "0", "step": step, "save": "0", "manifest": "manifest-a.json"}
        for step in range(_STEP + 1, _STEP + 1 + count)
    ]
    listing = json.dumps(entries, separators=(",", ":")).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            there = self.path == "/v1/steps"
            body = listing if there else b""
            self.send_response(200 if there else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    given_directory, given_rounds, *given_counts = sys.argv[1:]
    wanted = list(map(int, given_counts)) or _COUNTS
    print(json.dumps(measure(given_directory, int(given_rounds), wanted)))
