"""The page about Forgather's trainers works as it is written."""

import pathlib
import shutil

import numpy as np
import pytest

import elastic_ckpt
from tests import pages

ROOT = pathlib.Path(elastic_ckpt.__file__).parents[1]
PAGE = (ROOT / "elastic_ckpt" / "universal" / "FORGATHER.md").read_text()
GOLDEN = ROOT / "tests" / "golden" / "forgather"


@pytest.mark.slow(minutes=0.3)
def test_each_trainer_trains_and_continues_as_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "pipeline-2x2", "checkpoint-500")
    blocks = pages.blocks(PAGE)
    assert len(blocks) == 6
    page: dict = {}
    losses = {}
    for block in blocks:
        exec(compile(block, "FORGATHER.md", "exec"), page)
        losses |= {
            name.removesuffix("_loss"): value
            for name, value in page.items()
            if name.endswith("_loss")
        }
        if "pipeline" in losses and "hybrid" not in losses:
            # After two steps.
            expected = pytest.approx(losses["single"], rel=1e-5)
            assert losses["ddp"] == losses["pipeline"] == expected
    expected = pytest.approx(losses["single"], rel=1e-5)
    assert losses["hybrid"] == losses["tensor"] == expected
    assert np.asarray(page["layers"]).shape == (2, 4, 3)
    assert page["counters"].state == {"global_step": 7, "epoch": 0.5}
    assert page["schedule"].state["_last_lr"] == [0.0075]
    assert int(page["caches"].state["hits"]) == 5
    assert "optimizer PER_GROUP [0, 1]" in capsys.readouterr().out
