"""Every page of the site is executed: programs print what their page shows."""

import pathlib
import re
import shlex

import pytest
import yaml

from elastic_ckpt.cli import main
from elastic_ckpt.training import load
from tests import pages

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "pages").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
END = "end of a block"


def shown(page):
    """The programs of a page, each with the output that is shown below it, if any."""
    found, end_of_program = [], None
    for block in BLOCK.finditer(page):
        language, content = block.groups()
        if language == "python":
            found.append([content, None])
            end_of_program = block.end()
        # Only an empty line is between a program and its output.
        elif (
            language == "text"
            and end_of_program is not None
            and not page[end_of_program : block.start()].strip()
        ):
            found[-1][1] = content
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in PAGES if shown(p.read_text())], ids=lambda path: path.stem
)
def test_a_page_is_one_program_that_prints_what_is_shown(path, tmp_path):
    parts = shown(path.read_text())
    program = f"\nprint({END!r})\n".join(content for content, _ in parts)
    printed = pages.run(program, tmp_path).split(f"{END}\n")
    for (content, expected), actual in zip(parts, printed, strict=True):
        assert actual == (expected or ""), content


def test_every_command_is_one_that_the_command_line_takes():
    parser = main.build_parser()
    seen = 0
    for path in PAGES:
        for language, content in BLOCK.findall(path.read_text()):
            joined = content.replace("\\\n", " ")
            lines = joined.splitlines() if language == "sh" else []
            for line in lines:
                words = shlex.split(line)
                if "elastic-ckpt" in words and "--version" not in words:
                    arguments = words[words.index("elastic-ckpt") + 1 :]
                    given = parser.parse_args(arguments)
                    seen += 1
                    # MaxText's own keys are known to MaxText alone.
                    if given.verb == "train":
                        named = {each.partition("=")[0] for each in given.overrides}
                        assert named <= set(load.keys()), line
    assert seen >= 4


def listed(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from listed(below)


def test_every_page_has_its_place():
    # Plugins are named by tags of MkDocs, which are of no interest here.
    text = (DOCS / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    placed = {page for page in listed(nav) if (DOCS / "pages" / page).exists()}
    assert placed == {str(path.relative_to(DOCS / "pages")) for path in PAGES}
