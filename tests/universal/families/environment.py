"""The environment of Transformers, in which models are written and read back."""

import pathlib

from tests.environments import ROOT, Environment

TRANSFORMERS = Environment(
    ROOT / ".venv-families",
    pathlib.Path(__file__).parent / "pyproject.toml",
    "3.11",
)
