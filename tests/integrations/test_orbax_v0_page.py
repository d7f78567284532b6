"""ORBAX_V0.md works as it is written."""

import pathlib
import re
import subprocess
import sys

import elastic_ckpt as ec

ROOM = pathlib.Path(ec.__file__).parent / "integrations"
PAGE = (ROOM / "ORBAX_V0.md").read_text()


def test_the_block_runs_and_continues_when_it_is_run_again(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    # Orbax refuses relative paths.
    program = block.replace('"checkpoints"', f'"{tmp_path}/checkpoints"')
    program += "\nprint(step, state['tokens_seen'], manager.all_steps())"
    printed = []
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout.strip())
    assert printed == [
        f"10 {10 * 16 * 256} [5, 10]",
        f"20 {20 * 16 * 256} [15, 20]",
    ]


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOM / target).exists(), target
