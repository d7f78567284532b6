"""The page of formats lists each that is read, with its ranks."""

import pathlib
import re

from elastic_ckpt.universal import formats, opening
from elastic_ckpt.universal.writing import convert

PAGE = (pathlib.Path(formats.__file__).parent / "FORMATS.md").read_text()


def test_each_format_is_listed():
    rows = re.findall(r"^\| `(\w[\w -]*)`", PAGE, re.MULTILINE)
    # Megatron's opener reads two formats.
    assert len(rows) == len(opening._FORMATS) + 1
    source = "".join(
        path.read_text() for path in pathlib.Path(formats.__file__).parent.glob("*.py")
    )
    for name in rows:
        assert name.removesuffix("0") in source, name


def test_each_format_that_is_written_is_listed():
    assert set(re.findall(r"[|,] `--to (\w+)`", PAGE)) == set(convert.FORMATS)
