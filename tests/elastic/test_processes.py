"""`ec.elastic.Processes` with plain values, from a script as users write it."""

import subprocess
import sys

PROGRAM = """
import elastic_ckpt as ec

def train(world):
    pass

with ec.elastic.Processes(slices=2) as cluster:
    ec.elastic.run(train, cluster=cluster)
"""


def test_a_script_that_hosts_would_run_again_ends_and_says_why(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    read = {"capture_output": True, "text": True, "check": False, "timeout": 900}
    ended = subprocess.run([sys.executable, path], cwd=tmp_path, **read)
    assert ended.returncode != 0
    assert "the program cannot be imported" in ended.stderr.splitlines()[-1]
    assert (
        "ec.elastic.Processes starts processes that each run this script again; put"
        ' all code except definitions under `if __name__ == "__main__":`'
    ) in ended.stderr
