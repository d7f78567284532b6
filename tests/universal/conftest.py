"""Samples of checkpoints that other programs wrote; tests must not change them."""

import pytest

from tests.universal.formats import stored_values


def _unpacking(writer, tmp_path_factory):
    folder = tmp_path_factory.mktemp(writer)

    def sample(name):
        path = folder / name
        if not path.exists():
            stored_values.unpacked(f"{writer}/{name}.tar.xz", folder)
        return path

    return sample


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """Unpacks a sample of DeepSpeed by its name, once."""
    return _unpacking("deepspeed", tmp_path_factory)


@pytest.fixture(scope="session")
def megatron_samples(tmp_path_factory):
    """Unpacks a sample of Megatron by its name, once."""
    return _unpacking("megatron", tmp_path_factory)
