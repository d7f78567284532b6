"""Prepares every Python process that tests start (tests/conftest.py sets PYTHONPATH).

Shared memory is named after the session of tests that a process belongs to, so that a
session looks only at what it made itself.

Every host writes into JAX's compilation cache. JAX has host 0 alone do so, though on
CPU the keys of the others differ: in every run they would compile everything again,
which takes longer than all the rest.
"""

import os
import sys
import types
from importlib import machinery
from multiprocessing import process, shared_memory

_SESSION = os.environ.get("ELASTIC_CKPT_TEST_SESSION")
_COMPILER = "jax._src.compiler"
_HOST_0 = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))


class _CachingCompiler:
    """Finds JAX's compiler, and has its cache written as if by host 0."""

    @staticmethod
    def find_spec(name, path, _target=None):
        if name != _COMPILER:
            return None
        spec = machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            write = module._cache_write
            namespace = {**vars(module), "distributed": _HOST_0}
            module._cache_write = types.FunctionType(write.__code__, namespace)

        spec.loader.exec_module = exec_module
        return spec


if _SESSION:
    _PREFIX = f"/elastic_ckpt_tests_{_SESSION}_"
    shared_memory._SHM_NAME_PREFIX = _PREFIX
    # Room for the random part behind it.
    shared_memory._SHM_SAFE_NAME_LENGTH = len(_PREFIX) + 8
    process.current_process()._config["semprefix"] = _PREFIX
    sys.meta_path.insert(0, _CachingCompiler)
