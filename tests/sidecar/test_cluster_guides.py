"""The guides to clusters: their commands run in order, and their names are true."""

import pathlib
import re
import shlex

import pytest

from tests import pages, runs

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = {
    name: (ROOT / f"docs/pages/guides/{name}.md").read_text()
    for name in ("kubernetes", "kubernetes-failures", "pathways", "slurm")
}
FILE = re.compile(r"```yaml\n# (\S+\.yml)\n")


def lines(name):
    return "".join(pages.blocks(GUIDES[name], "sh")).splitlines()


@pytest.mark.parametrize("name", GUIDES)
def test_manifests_are_made_as_the_guide_says(name, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    named = FILE.findall(GUIDES[name])
    for file, content in zip(named, pages.blocks(GUIDES[name], "yaml"), strict=True):
        (tmp_path / file).write_text(content)
    commands = [shlex.split(line) for line in lines(name)]
    manifests = [
        words[1:] for words in commands if words[:2] == ["elastic-ckpt", "manifest"]
    ]
    assert len(manifests) > 2
    for arguments in manifests:
        output = tmp_path / arguments[arguments.index("--output") + 1]
        output.unlink(missing_ok=True)
        runs.verb(*arguments)
        assert output.exists(), arguments
