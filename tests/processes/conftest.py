"""The memory of the machines on which worlds are tried."""

import pytest

from tests.processes import machines


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started
