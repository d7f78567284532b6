"""The first loop of the guide, with the lines that the guide adds to it later."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import pytest

from tests import pages

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "pages" / "guides" / "own-loop.md"
ADDRESS = "127.0.0.1:9876"


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_from_one_set_of_checkpoints(tmp_path):
    page = GUIDE.read_text()
    joining, _ = pages.blocks(page, "py")
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


@pytest.mark.slow
def test_the_loop_goes_back_to_storage_by_the_lines_of_the_guide(tmp_path):
    page = GUIDE.read_text()
    data, model, loop, *_ = pages.blocks(page)
    _, going_back = pages.blocks(page, "py")
    # The loss of step 12 is bad once.
    spoilt = (
        "            if step in bad:\n"
        "                bad.remove(step)\n"
        "                loss = jnp.nan\n"
    )
    going_back = textwrap.indent(going_back, " " * 12)
    going_on = "                continue\n"
    assert going_on in going_back
    shown = f'                print("back to step", step)\n{going_on}'
    step_done = "            step += 1\n"
    storage_alone = '[ec.Persistent("checkpoints", every=5)]'
    for line in (step_done, storage_alone):
        assert loop.count(line) == 1
    loop = loop.replace(
        step_done, step_done + spoilt + going_back.replace(going_on, shown)
    ).replace(storage_alone, f'[ec.Local("ram", every=1), *{storage_alone}]')
    printed = pages.run(f"{data}bad = [12]\n{model}{loop}", tmp_path)
    assert printed.splitlines() == ["from step 0", "from step 10", "back to step 5"]
