"""Ctrl-C while a call waits."""

import signal
import threading


def pressed_during(call):
    """Calls in the main thread, which is interrupted a little later."""
    main = threading.main_thread().ident
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    return call()
