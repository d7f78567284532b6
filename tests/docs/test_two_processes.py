"""The first loop of the guide runs in two processes, as the guide says."""

import os
import pathlib
import socket
import subprocess
import sys

from tests import pages

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "pages" / "guides" / "own-loop.md"
ADDRESS = "127.0.0.1:9876"


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_two_processes_train_from_one_set_of_checkpoints(tmp_path):
    page = GUIDE.read_text()
    (joining,) = pages.blocks(page, "py")
    assert ADDRESS in joining
    data, model, loop, *_ = pages.blocks(page)
    # Each host has a file system of its own, in the guide; here they share one.
    data, write = data.replace("ec.data.lm.write", "# ec.data.lm.write"), data
    pages.run(write, tmp_path)
    program = joining.replace(ADDRESS, f"127.0.0.1:{free_port()}") + data + model + loop
    (tmp_path / "train.py").write_text(program)
    started = [
        subprocess.Popen(
            [sys.executable, "train.py", str(rank)],
            cwd=tmp_path,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [each.communicate() for each in started]
    assert [each.returncode for each in started] == [0, 0], ended
    for printed, _ in ended:
        lines = [each for each in printed.splitlines() if not each.startswith("[Gloo]")]
        assert lines == ["from step 0", "from step 10"]
