"""The examples of the page make what it states, and back."""

import ast
import pathlib
import re

import numpy as np
import pytest

from elastic_ckpt.universal import rules
from elastic_ckpt.universal.rules.layout import Layout
from tests import pages
from tests.universal.rules.relayout import relayout, saved

PAGE = (pathlib.Path(rules.__file__).parent / "GRAMMAR.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```\s*```text\n(.*?)```", PAGE, re.DOTALL)


def tensors(lines):
    for line in lines:
        name, shape, ranks = re.fullmatch(r"(\S+) (\[.*\])(.*)", line).groups()
        pairs = (pair.split("=") for pair in ranks.split())
        values = np.ones(ast.literal_eval(shape), np.float32)
        yield saved(name, values, **{axis: int(number) for axis, number in pairs})


assert len(EXAMPLES) == PAGE.count("```yaml")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_makes_the_tensors_below_it(number):
    text, example = EXAMPLES[number]
    values = dict(re.findall(r"^(\S+) = (\d+)$", example, re.M))
    lines = [line for line in example.splitlines() if " = " not in line]
    sources = list(tensors(line for line in lines if not line.startswith("-> ")))
    expected = {
        each.name: each.values.shape
        for each in tensors(line[3:] for line in lines if line.startswith("-> "))
    }
    axes = {axis: n + 1 for each in sources for axis, n in each.ranks}
    layout = Layout.parse(text).with_values(values)
    made = relayout(layout, sources, axes)
    assert {name: array.shape for name, array in made.items()} == expected


def test_the_python_example_is_a_layout():
    (block,) = pages.blocks(PAGE)
    names: dict = {}
    exec(block, names)
    made = relayout(names["layout"], {"head.weight": np.ones((3, 2))})
    assert made["head/kernel"].shape == (2, 3)
