"""Every test of this room reads within 1 GiB and 10 seconds of the processor."""

import functools

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import (
    bounded_json,
    closed_pickle,
    dcp_checkpoint,
    deepspeed,
    deepspeed_universal,
    forgather,
    megatron,
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
    *((forgather.Checkpoint, name) for name in ("state", "states", "weights")),
]


@pytest.fixture(autouse=True)
def limited_readers(monkeypatch):
    """Limits what every reader takes, whether it succeeds or not."""
    for module, name in READERS:
        reader = getattr(module, name)

        def limited(*args, reader=reader, **options):
            with process_limits.limited():
                return reader(*args, **options)

        monkeypatch.setattr(module, name, functools.wraps(reader)(limited))
