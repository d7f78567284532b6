"""Conversions between raw formats start fast."""

import json
import subprocess
import sys

import numpy as np

from tests.universal.writing import small_model

_CONVERT = """
import json, sys
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.conversion import Job
convert.convert(Job(source=sys.argv[1], target=sys.argv[2], to="safetensors"))
print(json.dumps(sorted(sys.modules)))
"""


def test_raw_formats_are_converted_without_jax_orbax_and_tensorstore(tmp_path):
    small_model.write(tmp_path / "source", {"w": np.ones(3, np.float32)})
    paths = [str(tmp_path / "source"), str(tmp_path / "made")]
    imported = json.loads(
        subprocess.check_output([sys.executable, "-c", _CONVERT, *paths])
    )
    assert not {"jax", "orbax", "tensorstore", "fsspec"}.intersection(imported)
    assert "numpy" in imported
