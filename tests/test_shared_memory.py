import pathlib
import subprocess
import sys

from tests import shared_memory

MAKES = """
import multiprocessing
from multiprocessing import shared_memory
made = shared_memory.SharedMemory(create=True, size=1)
held = multiprocessing.get_context("spawn").Semaphore()
print(made.name, held._semlock.name)
made.unlink()
"""


def test_processes_name_what_they_share_after_the_session_that_started_them():
    made = subprocess.run(
        [sys.executable, "-c", MAKES], capture_output=True, text=True, check=True
    )
    for name in made.stdout.split():
        assert name.lstrip("/").startswith(shared_memory.prefix())


def test_a_session_looks_only_at_what_it_made():
    assert shared_memory.left_behind() == []
    another = pathlib.Path("/dev/shm/elastic_ckpt_tests_1_")
    unnamed = pathlib.Path("/dev/shm/psm_of_another_session")
    semaphore = pathlib.Path(f"/dev/shm/sem.{shared_memory.prefix()}x")
    try:
        for path in (another, unnamed, semaphore):
            path.touch()
        with shared_memory.directory("kind") as own:
            left = shared_memory.left_behind()
            assert left == [pathlib.Path(own).name, semaphore.name]
    finally:
        for path in (another, unnamed, semaphore):
            path.unlink()
    assert shared_memory.left_behind() == []
