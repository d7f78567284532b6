"""Samples of checkpoints that DeepSpeed wrote."""

import pytest

from tests.universal.formats import stored_values


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """Unpacks a sample by its name, once; tests must not change it."""
    folder = tmp_path_factory.mktemp("deepspeed")

    def sample(name):
        path = folder / name
        if not path.exists():
            stored_values.unpacked(f"deepspeed/{name}.tar.xz", folder)
        return path

    return sample
