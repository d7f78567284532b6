"""Samples of checkpoints that other programs wrote."""

import functools

import pytest

from tests.universal.formats import stored_values


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """Unpacks a sample by its name, once; tests must not change it."""
    folder = tmp_path_factory.mktemp("samples")
    return functools.cache(lambda name: stored_values.sample(name, folder))
