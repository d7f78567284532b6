"""The links of every page lead to files and headings."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        path
        for room in ("configs", "elastic_ckpt", "sidecar", "tests")
        for path in (ROOT / room).rglob("*.md")
    ),
]


def headings(page):
    """The headings of a page, as links name them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            path, _, heading = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not heading or heading in headings(file), target
