"""The guide to MaxText works as it is written."""

import os
import re
import subprocess

import pytest

from elastic_ckpt.integrations import maxtext_hooks, maxtext_keys
from tests import pages, shared_memory
from tests.maxtext import environment

GUIDE = (environment.ROOT / "docs/pages/guides/maxtext.md").read_text()
# By the name in their first lines.
FILES = {
    block.removeprefix("# ").split(maxsplit=1)[0]: block
    for block in pages.blocks(GUIDE, "yaml")
}
BLOCKS = pages.blocks(GUIDE, "sh")
SET_UP, FIRST, CONTINUED, PLAN, LIVE, CONVERTED = BLOCKS


def shell(commands, directory):
    """Runs commands in a directory, in MaxText's environment; returns the process."""
    ended = subprocess.run(
        ["bash", "-ec", commands],
        cwd=directory,
        env={
            **os.environ,
            "PATH": f"{environment.ENVIRONMENT}/bin:{os.environ['PATH']}",
            "JAX_COMPILATION_CACHE_DIR": f"{directory}/cache",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-5000:]
    return ended


def test_the_way_to_set_it_up_is_that_of_the_dependency_group():
    lines = [" ".join(line.split()) for line in SET_UP.replace("\\\n", "").splitlines()]
    documented = [" ".join(c.split()) for c in environment.documented_commands()]
    assert lines == [*documented, "source .venv-maxtext/bin/activate"]
    assert len(documented) == 2


def test_it_installs_the_version_that_the_seam_is_written_for():
    assert f'"maxtext=={maxtext_hooks.TESTED_VERSION}"' in environment.GROUP.read_text()
    assert f"MaxText {maxtext_hooks.TESTED_VERSION} from PyPI" in GUIDE


@pytest.mark.night
def test_each_key_of_maxtext_for_what_we_replace_is_read_or_listed():
    environment.set_up()
    (base,) = environment.ENVIRONMENT.glob(
        "lib/*/site-packages/maxtext/configs/base.yml"
    )
    pattern = r"^((?:grain|elastic|mtc|multi_tier|local_checkpoint)_\w+):"
    theirs = set(re.findall(pattern, base.read_text(), re.MULTILINE))
    assert {"grain_train_files", "elastic_enabled"} < theirs
    read = {
        *maxtext_keys.DATA_KEYS,
        *maxtext_keys.TIER_KEYS,
        *maxtext_keys.ELASTIC_KEYS,
    }
    assert not {key for key in theirs - read if f"`{key}`" not in GUIDE}


@pytest.mark.night
def test_its_run_continues_on_two_hosts_without_a_lost_example(tmp_path):
    environment.set_up()
    (tmp_path / "tiny.yml").write_text(FILES["tiny.yml"])
    exports = next(line for line in FIRST.splitlines() if line.startswith("export"))
    first = shell(FIRST, tmp_path)
    assert re.findall(r"completed step: (\d+),", first.stderr)[-1] == "9"
    continued = shell(f"{exports}\n{CONTINUED}", tmp_path)
    assert "20" in re.findall(r"steps?\D+(\d+)", continued.stdout)
    steps = [each.name for each in (tmp_path / "runs/tiny/checkpoints").iterdir()]
    assert "19" in steps


@pytest.mark.night
def test_its_elastic_run_loses_a_slice_and_continues(tmp_path):
    environment.set_up()
    (tmp_path / "tiny.yml").write_text(FILES["tiny.yml"])
    exports_and_data = "\n".join(FIRST.splitlines()[:2])
    with shared_memory.directory("page") as ram:
        text = FILES["live.yml"].replace("/dev/shm", ram)
        assert ram in text
        (tmp_path / "live.yml").write_text(text)
        ended = shell(f"{exports_and_data}\n{LIVE}", tmp_path)
    assert "slice 1 is lost: host 1 failed: killed by SIGKILL" in ended.stdout
    assert "world 2 starts on slices 0" in ended.stdout
