import sys

import pathwaysutils
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import single_controller
from tests import runs


def test_a_head_that_was_not_started_beside_a_proxy_says_what_starts_it(
    corpus, tmp_path
):
    config = runs.write_config(tmp_path, corpus, enable_single_controller=True)
    output = runs.verb("train", config, code=errors.CONFIG_EXIT_CODE)
    assert "JAX_PLATFORMS does not contain `proxy`" in output
    assert "configs/deploy/base/pathways" in output


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(errors.ConfigError, match=r"'\.\[pathways\]'"):
        single_controller.initialize()


def test_beside_a_proxy_pathways_is_initialized(monkeypatch):
    calls = []
    monkeypatch.setattr(pathwaysutils, "is_pathways_backend_used", lambda: True)
    monkeypatch.setattr(pathwaysutils, "initialize", lambda: calls.append("initialize"))
    single_controller.initialize()
    assert calls == ["initialize"]
