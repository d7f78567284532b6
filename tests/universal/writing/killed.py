"""Work in a process that is killed while it writes."""

import multiprocessing
import signal


def run(work, *arguments):
    """Runs `work` in a process, which kills itself."""
    child = multiprocessing.get_context("forkserver").Process(
        target=work, args=arguments
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
