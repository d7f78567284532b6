"""The page about Forgather reads a checkpoint of Forgather as it is written.

Its trainers are run with the other pages of the site (tests/docs).
"""

import pathlib
import shutil

import numpy as np

from tests import pages

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/pages/coming-from/forgather.md").read_text()
GOLDEN = ROOT / "tests" / "golden" / "forgather"


def test_weights_and_components_of_forgather_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "pipeline-2x2", "checkpoint-500")
    (block,) = pages.blocks(PAGE, "py")
    page: dict = {}
    exec(compile(block, "forgather.md", "exec"), page)
    assert np.asarray(page["layers"]).shape == (2, 4, 3)
    assert page["counters"].state == {"global_step": 7, "epoch": 0.5}
    assert page["schedule"].state["_last_lr"] == [0.0075]
    assert int(page["caches"].state["hits"]) == 5
    assert "optimizer PER_GROUP [0, 1]" in capsys.readouterr().out
