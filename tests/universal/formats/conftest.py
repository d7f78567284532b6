"""Every test of this room reads within the limits of `process_limits`."""

import functools
import inspect

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import (
    bounded_json,
    closed_pickle,
    dcp_checkpoint,
    deepspeed,
    deepspeed_universal,
    forgather,
    megatron,
    opened,
    safetensors_file,
    torch_zip,
)
from tests.universal.formats import process_limits

READERS = [
    (opening, "open_checkpoint"),
    (dcp_checkpoint, "open_checkpoint"),
    (deepspeed, "open_checkpoint"),
    (deepspeed_universal, "open_checkpoint"),
    (megatron, "open_checkpoint"),
    (bounded_json, "parse"),
    (closed_pickle, "decode"),
    (safetensors_file, "read"),
    (safetensors_file, "read_header"),
    (torch_zip, "read"),
    (opened.OpenedCheckpoint, "check"),
    *(
        (forgather.Checkpoint, name)
        for name in ("open", "state", "states", "weights", "metadata", "load_into")
    ),
]


@pytest.fixture(autouse=True)
def limited_readers(monkeypatch, pytestconfig):
    """Limits what every reader takes, whether it succeeds or not."""
    stderr = pytestconfig.stash[fault_handler_stderr_fd_key]
    monkeypatch.setattr(process_limits, "traceback_file", stderr)
    for module, name in READERS:
        reader = getattr(module, name)

        def limited(*args, reader=reader, **options):
            with process_limits.limited():
                return reader(*args, **options)

        limited = functools.wraps(reader)(limited)
        if inspect.ismethod(reader):
            limited = staticmethod(limited)
        monkeypatch.setattr(module, name, limited)
