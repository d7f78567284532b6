import os
import subprocess
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
    assert "`elastic-ckpt manifest`" in output


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


@pytest.mark.slow
def test_beside_a_proxy_jax_computes_through_pathways():
    program = (
        "from elastic_ckpt.elastic import single_controller\n"
        "single_controller.initialize()\n"
        "from jax._src import xla_bridge\n"
        "print(jax.config.jax_platforms, 'proxy' in xla_bridge._backend_factories)"
    )
    # As the manifest has it; there is no proxy here to answer.
    environment = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://localhost:1"}
    ended = subprocess.run(
        [sys.executable, "-c", "import jax\n" + program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "proxy True\n"
