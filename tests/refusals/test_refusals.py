"""Every likely mistake has one clear error, and nothing is written."""

import importlib
import pathlib
import pkgutil
import re

import pytest

from tests import refusals

ROWS = [
    pytest.param(row, id=f"{module.name}-{mistake}")
    for module in pkgutil.iter_modules(refusals.__path__)
    if not module.name.startswith("test_")
    for mistake, row in importlib.import_module(
        f"tests.refusals.{module.name}"
    ).REFUSALS.items()
]


@pytest.mark.parametrize("row", ROWS)
def test_mistake_is_refused_in_one_clear_line(row: refusals.Refusal, tmp_path):
    with pytest.raises(row.error) as raised:
        row.call(tmp_path)
    message = str(raised.value)
    assert re.search(row.says, message), message
    assert "\n" not in message
    assert len(message) <= 600, message
    if not row.writes:
        assert not list(pathlib.Path(tmp_path).iterdir())
