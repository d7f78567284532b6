"""MAXTEXT.md works as it is written."""

import os
import re
import subprocess

import pytest

from elastic_ckpt.integrations import maxtext_config, maxtext_seams
from tests.maxtext import environment

PAGE = (environment.ROOT / "elastic_ckpt/integrations/MAXTEXT.md").read_text()


def blocks():
    return re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def test_the_way_to_set_it_up_is_that_of_the_dependency_group():
    written = [" ".join(line.replace("\\\n", "").split()) for line in [blocks()[0]]]
    commands = [" ".join(c.split()) for c in environment.documented_commands()]
    assert written == [" ".join(commands)]
    assert len(commands) == 2


def test_it_installs_the_version_that_the_seam_is_written_for():
    assert f'"maxtext=={maxtext_seams.TESTED_VERSION}"' in environment.GROUP.read_text()
    assert f"MaxText {maxtext_seams.TESTED_VERSION} from PyPI" in PAGE


def test_it_names_each_key_of_ours_and_each_that_is_refused():
    for key in maxtext_config.OWN_KEYS:
        assert f"| `{key}` |" in PAGE
    for key in maxtext_config._REMEDIES:
        assert f"`{key}`" in PAGE


@pytest.mark.slow(minutes=0.9)
def test_the_worked_command_trains_and_continues(tmp_path):
    environment.set_up()
    (tmp_path / ".venv-maxtext").symlink_to(environment.ENVIRONMENT)
    commands = blocks()[1]
    for steps in (10, 12):
        ended = subprocess.run(
            ["bash", "-ec", commands.replace("steps=10", f"steps={steps}")],
            cwd=tmp_path,
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/cache"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-5000:]
    printed = re.findall(r"completed step: (\d+),", ended.stderr)
    assert printed == ["10", "11"]
