"""ORBAX_V0.md works as it is written."""

import pathlib

import pytest

import elastic_ckpt as ec
from tests import pages

PAGE = (pathlib.Path(ec.__file__).parent / "integrations/ORBAX_V0.md").read_text()


@pytest.mark.slow(minutes=0.1)
def test_the_block_runs_and_continues_when_it_is_run_again(tmp_path):
    (block,) = pages.blocks(PAGE)
    # Orbax refuses relative paths.
    program = block.replace('"checkpoints"', f'"{tmp_path}/checkpoints"')
    program += "\nprint(step, state['tokens_seen'], manager.all_steps())"
    printed = [pages.run(program, tmp_path).strip() for _ in range(2)]
    assert printed == [
        f"10 {10 * 16 * 256} [5, 10]",
        f"20 {20 * 16 * 256} [15, 20]",
    ]
