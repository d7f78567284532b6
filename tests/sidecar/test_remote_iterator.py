import subprocess
import sys

import pytest
from elastic_ckpt_sidecar import RemoteIterator

from elastic_ckpt.core import topology
from tests import iterator_contract


class TestRemoteIterator(iterator_contract.IteratorContract):
    def make(self, data):
        return RemoteIterator(
            data,
            mesh=topology.mesh_of(topology.present(2)),
            global_batch_size=iterator_contract.GLOBAL_BATCH_SIZE,
        )


USE = """
import sys
from elastic_ckpt.core import topology
from elastic_ckpt.data import positional_data
from elastic_ckpt_sidecar import RemoteIterator
mesh = topology.mesh_of(topology.present(1))
data = positional_data.PositionalData(files=(sys.argv[1],), max_target_length=8)
batches = RemoteIterator(data, mesh=mesh, global_batch_size=2)
next(batches)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "batches.close()", "raise SystemExit(0)"])
def test_a_program_that_used_it_ends_without_a_word(corpus, end):
    ended = subprocess.run(
        [sys.executable, "-c", USE + end, corpus],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout + ended.stderr == ""


@pytest.mark.slow
def test_of_ours_a_bare_sidecar_imports_no_room_above_data():
    program = (
        "import sys, elastic_ckpt_sidecar\n"
        "from elastic_ckpt.data import positional_data\n"
        "print([m for m in sys.modules if m.startswith(('elastic_ckpt.cli',"
        " 'elastic_ckpt.checkpoint', 'elastic_ckpt.elastic',"
        " 'elastic_ckpt.training'))])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"
