"""The id of a RAM disk, which only a directory of the same user has."""

import os
import re
import stat

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.ram import machine
from tests import shared_memory


def test_a_directory_has_one_id_and_is_its_owners_alone(tmp_path):
    root = tmp_path / "run"
    first = machine.machine_id(root)
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert machine.machine_id(root) == first == machine.find(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
@pytest.mark.parametrize("is_used", [False, True])
def test_a_directory_that_belongs_to_another_user_is_refused(is_used):
    with shared_memory.directory("owner") as parent:
        root = os.path.join(parent, "run")
        os.mkdir(root)
        if is_used:
            machine.machine_id(root)
        os.chown(root, 65534, 65534)
        before = os.listdir(root)
        with pytest.raises(
            errors.CheckpointError, match=r"belongs to user 65534.* set"
        ):
            machine.machine_id(root)
        assert os.listdir(root) == before
