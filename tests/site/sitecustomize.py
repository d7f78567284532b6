"""Names shared memory after the session of tests that this process belongs to.

Every Python process that tests start imports this (tests/conftest.py sets PYTHONPATH),
so that a session looks only at what it made itself.
"""

import os
from multiprocessing import process, shared_memory

_SESSION = os.environ.get("ELASTIC_CKPT_TEST_SESSION")
if _SESSION:
    _PREFIX = f"/elastic_ckpt_tests_{_SESSION}_"
    shared_memory._SHM_NAME_PREFIX = _PREFIX
    # Room for the random part behind it.
    shared_memory._SHM_SAFE_NAME_LENGTH = len(_PREFIX) + 8
    process.current_process()._config["semprefix"] = _PREFIX
