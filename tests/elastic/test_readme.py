"""The program of the page about elastic runs works as it is written."""

import importlib.resources
import re

import pytest

import elastic_ckpt
from tests import pages

ROOM = importlib.resources.files(elastic_ckpt) / "elastic"
PAGE = (ROOM / "README.md").read_text()


@pytest.mark.slow(minutes=0.6)
def test_a_loop_in_flax_nnx_loses_a_slice_and_gets_it_back(tmp_path):
    (program,) = pages.blocks(PAGE)
    printed = pages.run(program, tmp_path)
    lines = re.findall(r"step (\d+): loss (\S+) on slices \((.*)\)", printed)
    slices = {int(step): on for step, _, on in lines}
    assert list(slices) == list(range(1, 31))
    assert {slices[step] for step in range(1, 9)} == {"0, 1, 2, 3"}
    assert {slices[step] for step in range(11, 21)} == {"0, 2, 3"}
    assert {slices[step] for step in range(21, 31)} == {"0, 1, 2, 3"}
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[-1] < 0.6 * losses[0]
