"""`ec.elastic.Processes` with plain values, from a script as users write it."""

import re
import subprocess
import sys

import pytest

PROGRAM = """
import elastic_ckpt as ec

def train(world):
    assert world.ram_directory is None
    for step in range(1, 21):
        if world.leaving(step):
            return

def main():
    with ec.elastic.Processes(slices=2, run="x") as cluster:
        ec.elastic.run(train, cluster=cluster)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("good", "bad", "line", "says"),
    [
        # Each host would run it again.
        (
            *('if __name__ == "__main__":', "if True:"),
            "the program cannot be imported",
            "ec.elastic.Processes starts processes that each run this script again; put"
            ' all code except definitions under `if __name__ == "__main__":`',
        ),
        # Hosts cannot get its training function.
        pytest.param(
            *("run(train,", "run(lambda world: None,"),
            "the training function cannot be sent to host processes",
            "<lambda>.*; define it with `def` at the top level of a module",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_hosts_cannot_run_ends_and_says_why(
    tmp_path, good, bad, line, says
):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace(good, bad))
    ended = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert ended.returncode != 0
    assert line in ended.stderr.strip().splitlines()[-1]
    assert re.search(says, ended.stderr)
    # One line says it, but for what hosts have printed.
    assert ended.stderr.count("Traceback") == 1 or "this script again" in says
