"""Runs one part of `.ci/run` and notes what it took: part.py TABLE NAME GOAL COMMAND...

`part.py TABLE` prints the table. Seconds mean little on a shared machine, so the speed
of a loop of plain Python stands beside them. Nothing fails by its time.
"""

import pathlib
import resource
import subprocess
import sys
import time

# The loop on an idle core of the 2-core AMD EPYC machine that the goals are for.
QUIET_MSECS = 0.69


def loop_msecs() -> float:
    """The median of many turns of the loop: a core's speed, not its load."""
    turns = []
    for _ in range(50):
        start = time.thread_time()
        total = 0
        for number in range(20_000):
            total += number * number
        turns.append(1e3 * (time.thread_time() - start))
    return sorted(turns)[len(turns) // 2]


def main(table: str, *arguments: str) -> int:
    """Runs the part, or prints the table."""
    path = pathlib.Path(table)
    if not arguments:
        print(f"{'part':<12}{'secs':>8}{'cpu secs':>10}{'goal secs':>11}{'loop ms':>9}")
        print(path.read_text(), end="")
        print(f"The loop takes {QUIET_MSECS} ms where the goals hold.")
        return 0
    name, goal, *command = arguments
    print(f"== {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    code = subprocess.run(command).returncode
    secs = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_secs = usage.ru_utime + usage.ru_stime
    with path.open("a") as file:
        file.write(
            f"{name:<12}{secs:8.0f}{cpu_secs:10.0f}{goal:>11}{loop_msecs():9.2f}\n"
        )
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
