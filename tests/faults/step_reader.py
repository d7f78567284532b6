"""A program that follows a run and reads each step, slowly; or leases one for ever."""

import pathlib
import sys
import time

import elastic_ckpt as ec


def contents(path):
    return {
        str(each.relative_to(path)): each.read_bytes()
        for each in sorted(pathlib.Path(path).rglob("*"))
        if each.is_file()
    }


def main(directory, mode):
    # The run counts the lease of a reader that is killed for so long.
    secs = 60.0 if mode == "hold" else 600.0
    for step in ec.watch_steps(directory, poll_secs=0.05, duration_secs=secs):
        if mode == "hold":
            print(step.step, flush=True)
            time.sleep(3600)
        before = contents(step.path)
        time.sleep(0.2)
        assert contents(step.path) == before
        print(step.step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
