"""Limits the memory and the time of the processor that calls may take."""

import contextlib
import ctypes
import faulthandler
import pathlib
import resource
import signal
import threading

MOST_BYTES = 1 << 30
# Ten times what a sound processor takes: what grows faster than its source takes hours.
MOST_SECS = 100
# The processor may be shared. Functions of C that do not return to Python, or threads
# that are waited for, end the process then, with a traceback that names the test.
MOST_WALL_SECS = 1000
_STATUS = pathlib.Path("/proc/self/statm")
# mallopt's M_ARENA_MAX: with one for each thread, threads reserve memory.
_ARENA_MAX = -8
_active = threading.Lock()
# The file of tracebacks; pytest redirects the standard error of tests.
traceback_file = 2


class TooLongError(Exception):
    """A call took more time of the processor."""


def _too_long(*_):
    # It comes each second, and the memory of the call may take longer to free.
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    raise TooLongError(f"more than {MOST_SECS} seconds of the processor")


@contextlib.contextmanager
def limited():
    """Calls in it get MemoryError beyond `MOST_BYTES`, and this error in time.

    The process itself is limited, so all allocations and all threads count.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # Readers call each other, and threads of them.
    if not is_main or not _active.acquire(blocking=False):
        yield
        return
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)
    pages = int(_STATUS.read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + MOST_BYTES,
        resource.RLIMIT_CPU: _processor_secs() + MOST_SECS + 1,
    }
    before = {each: resource.getrlimit(each) for each in limits}
    handler = signal.signal(signal.SIGXCPU, _too_long)
    faulthandler.dump_traceback_later(MOST_WALL_SECS, exit=True, file=traceback_file)
    try:
        for each, limit in limits.items():
            resource.setrlimit(each, (limit, before[each][1]))
        yield
    except TooLongError as error:
        # It may come between lines, which pytest cannot show.
        raise TooLongError(str(error)) from None
    finally:
        for each, previous in before.items():
            resource.setrlimit(each, previous)
        signal.signal(signal.SIGXCPU, handler)
        faulthandler.cancel_dump_traceback_later()
        _active.release()


def _processor_secs():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int(usage.ru_utime + usage.ru_stime)
