"""Prepares every Python process that tests start (tests/conftest.py sets PYTHONPATH).

Shared memory is named after the session of tests that a process belongs to, so that a
session looks only at what it made itself.

Every host writes into JAX's compilation cache. JAX has host 0 alone do so, though on
CPU the keys of the others differ: in every run they would compile everything again,
which takes longer than all the rest. An entry is there at once, because hosts are
killed while they write, and processes of other tests read. A program that cannot be
serialized is compiled each time, without a warning.
"""

import os
import sys
import threading
import types
from importlib import machinery
from multiprocessing import process, shared_memory

_SESSION = os.environ.get("ELASTIC_CKPT_TEST_SESSION")
_STAND_INS = {
    "distributed": types.SimpleNamespace(
        global_state=types.SimpleNamespace(process_id=0)
    ),
    "warnings": types.SimpleNamespace(warn=lambda _: None),
}


def _put(cache, key, value):
    entry = os.path.join(cache.path, f"{key}-cache")
    unfinished = f"{entry}.{os.getpid()}.{threading.get_ident()}"
    with open(unfinished, "wb") as file:
        file.write(value)
    os.replace(unfinished, entry)


def _cache_in_every_process(compiler):
    write = compiler._cache_write.__code__
    namespace = {**vars(compiler), **_STAND_INS}
    compiler._cache_write = types.FunctionType(write, namespace)


def _write_at_once(lru_cache):
    lru_cache.LRUCache.put = _put


class _Changed:
    """Finds modules of JAX, and changes them when they are imported."""

    CHANGES = types.MappingProxyType(
        {
            "jax._src.compiler": _cache_in_every_process,
            "jax._src.lru_cache": _write_at_once,
        }
    )

    @classmethod
    def find_spec(cls, name, path, _target=None):
        change = cls.CHANGES.get(name)
        if change is None:
            return None
        spec = machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if _SESSION and sys.version_info >= (3, 12) and "XLA_FLAGS" in os.environ:
    # JAX aborts for a flag that it lacks: that of a test on another Python.
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(
        "--xla_cpu_use_fusion_emitters=false", ""
    )
if _SESSION:
    _PREFIX = f"/elastic_ckpt_tests_{_SESSION}_"
    shared_memory._SHM_NAME_PREFIX = _PREFIX
    # Room for the random part behind it.
    shared_memory._SHM_SAFE_NAME_LENGTH = len(_PREFIX) + 8
    process.current_process()._config["semprefix"] = _PREFIX
    sys.meta_path.insert(0, _Changed)
    for _name, _change in _Changed.CHANGES.items():
        if _name in sys.modules:
            _change(sys.modules[_name])
