"""Every test of this room reads within the limits of `process_limits`."""

import functools
import inspect

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from elastic_ckpt.integrations import forgather
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import (
    dcp,
    deepspeed,
    deepspeed_universal,
    megatron,
    opened,
    plain_pickle,
    safetensors_file,
    source_files,
    torch_file,
)
from tests.universal.formats import process_limits

READERS = [
    (opening, "open_checkpoint"),
    (dcp, "open_checkpoint"),
    (deepspeed, "open_checkpoint"),
    (deepspeed_universal, "open_checkpoint"),
    (megatron, "open_checkpoint"),
    (source_files, "parse_json"),
    (plain_pickle, "value"),
    (safetensors_file, "read"),
    (safetensors_file, "read_header"),
    (torch_file, "read"),
    (torch_file, "read_arrays"),
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
