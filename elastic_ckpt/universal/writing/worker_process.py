"""The processes of a conversion: each writes its share, and reports by lines of JSON.

    {"done": 1048576}                 bytes so far
    {"error": "model.safetensors ..."}

The lines have a separate pipe, whose number is the argument of a process: prints of
libraries go to the standard error. A process ends at once when its standard input
closes, so that none outlives a conversion that was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TextIO

from elastic_ckpt.core import errors
from elastic_ckpt.universal.writing.conversion import Job

_PROGRESS_SECS = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Worker:
    process: subprocess.Popen[str]
    reports: TextIO


def run_all(
    job: Job,
    attempt: str,
    num_processes: int,
    note: Callable[[int, int], None],
) -> None:
    """Writes all shares, each in a process.

    Args:
      job: what is converted.
      attempt: as the destination has prepared it.
      num_processes: to start.
      note: called with the number of a process and the bytes that it has done.

    Raises:
      CheckpointError: with the first error of a process; the others are ended.
    """
    lock = threading.Lock()

    def note_one(host: int, num_bytes: int) -> None:
        with lock:
            note(host, num_bytes)

    workers: list[_Worker] = []
    try:
        for host in range(num_processes):
            workers.append(_started(job, attempt, host, num_processes))
        with futures.ThreadPoolExecutor(num_processes) as pool:
            waiting = [
                pool.submit(_wait, host, worker, note_one)
                for host, worker in enumerate(workers)
            ]
            try:
                for each in futures.as_completed(waiting):
                    each.result()
            except BaseException:
                _kill(workers)
                raise
    finally:
        _kill(workers)


def _started(job: Job, attempt: str, host: int, num_hosts: int) -> _Worker:
    reports, reporting = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(reporting)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[reporting],
            text=True,
            # It computes on no device.
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    finally:
        os.close(reporting)
    assert process.stdin is not None
    share = {"attempt": attempt, "host": host, "num_hosts": num_hosts}
    # A process that has ended already is an error when its reports are read.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps({"job": dataclasses.asdict(job), **share}))
        process.stdin.write("\n")
        process.stdin.flush()
    return _Worker(process=process, reports=os.fdopen(reports))


def _wait(host: int, worker: _Worker, note: Callable[[int, int], None]) -> None:
    for line in worker.reports:
        report = json.loads(line)
        if "error" in report:
            raise errors.CheckpointError(report["error"])
        note(host, report["done"])
    code = worker.process.wait()
    if code:
        raise errors.CheckpointError(
            f"process {host} of the conversion ended with code {code}; convert again:"
            " what is complete is kept"
        )


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        worker.reports.close()
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.close()


def main() -> int:
    """Writes the share that standard input describes; returns the exit status."""
    reports = os.fdopen(int(sys.argv[1]), "w")

    def report(**content: int | str) -> None:
        print(json.dumps(content), file=reports, flush=True)

    # The module imports this one.
    from elastic_ckpt.universal.writing import convert

    # Not `sys.stdin`, whose lock an interpreter that ends would wait for.
    with os.fdopen(os.dup(0), "r") as given:
        request: dict[str, Any] = json.loads(given.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    shown_secs = 0.0

    def show(done: int, total: int) -> None:
        nonlocal shown_secs
        now = time.monotonic()
        if done == total or now - shown_secs >= _PROGRESS_SECS:
            shown_secs = now
            report(done=done)

    try:
        convert.write_share(
            Job(**request["job"]),
            request["attempt"],
            request["host"],
            request["num_hosts"],
            show,
        )
    except errors.ElasticCkptError as error:
        report(error=str(error))
        return 1
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
