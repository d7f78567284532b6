"""Pickles become plain values; nothing that they name is imported or called."""

import collections
import enum
import io
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest

from elastic_ckpt.universal.formats import (
    plain_pickle,
    plain_values,
    source_budget,
    source_files,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from tests.universal.formats import torch_files


class Plain:
    """A class with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class WithState:
    """A class with a state that is no dict."""

    def __getstate__(self):
        return (1, 2)

    def __setstate__(self, state):
        raise AssertionError("called")


class Slots:
    """A class without a dict of attributes."""

    __slots__ = ("a",)


class Kind(enum.Enum):
    """An enumeration."""

    FIRST = 7


class Version(str):
    """A text."""


def decoded(content, budget=None):
    return plain_pickle.value(
        content,
        file="x.pkl",
        budget=budget or SourceBudget(),
        names={"torch.float32": "float32"},
        tensor=list,
    )


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_become_records_of_their_attributes(protocol):
    slots = Slots()
    slots.a = 1
    listed = collections.deque([1, 2])
    defaults = collections.defaultdict(list, {"x": [1]})
    value = {
        "a": Plain(b=[1], c=Plain()),
        "d": WithState(),
        "slots": slots,
        "kind": Kind.FIRST,
        "path": pathlib.PosixPath("/x/y"),
        "listed": listed,
        "defaults": defaults,
        "version": Version("2.13"),
        "class": Plain,
        "buffer": io.BytesIO(b"xyz"),
        "complex": 1 + 2j,
    }
    read = decoded(pickle.dumps(value, protocol=protocol))
    assert read == {
        "a": {"b": [1], "c": {}},
        "d": {"state": (1, 2)},
        "slots": {"a": 1},
        "kind": 7 if sys.version_info >= (3, 12) else read["kind"],
        "path": "/x/y",
        "listed": [1, 2],
        "defaults": {"x": [1]},
        "version": "2.13",
        "class": f"{__name__}.Plain",
        "buffer": {"state": (b"xyz", 0, None)},
        "complex": {},
    }
    assert read["kind"] in (7, "FIRST")
    assert isinstance(read["a"], plain_pickle.Record)


def test_plain_values_are_as_they_were():
    value = {
        1: [2**70, -1, 0.5, float("inf"), True, None, "\ud800", b"\x00\xff"],
        (1, "x", 1.5): ({2, 3}, frozenset([4])),
    }
    assert decoded(pickle.dumps(value)) == value


def test_values_cannot_contain_themselves():
    value = Plain()
    value.self = value
    with pytest.raises(FormatError, match=r"x\.pkl holds .* nested deeper"):
        decoded(pickle.dumps(value))


@pytest.mark.parametrize(
    "content",
    [
        # Attributes of a class; of a class of the decoder; of a built-in one.
        b"\x80\x02cx\ny\n(N}X\x01\x00\x00\x00aK\x01stb.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}X\x07\x00\x00\x00__new__K\x01stb.",
        b"\x80\x02ctorch\nSize\n(N}X\x01\x00\x00\x00aK\x01stb.",
        # A call of a text, and of an object.
        b"\x80\x02X\x01\x00\x00\x00a)R.",
        b"\x80\x02cx\ny\n)R)R.",
        # An object of a text; an extension; a persistent id of none.
        b"\x80\x02X\x01\x00\x00\x00a)\x81.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02NQ.",
        b"\x80\x02N.N.",
    ],
)
def test_what_the_decoder_does_not_do_is_one_error(content):
    with pytest.raises(FormatError, match=r"x\.pkl .*"):
        decoded(content)
    tensor = torch_files.pickled(torch_files.tensor())
    assert decoded(tensor)[3:6] == [0, [2, 2], [2, 1]]


class Touch:
    """Runs a command when Python unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_classes_of_metadata_are_names_too():
    name = "torch.distributed.checkpoint.metadata.Metadata"
    module, _, kind = name.rpartition(".")
    assert decoded(torch_files.pickled(torch_files.Global(module, kind))) == name


def test_no_call_is_made(tmp_path):
    decoded(pickle.dumps([Touch(tmp_path / "x")]))
    decoded(b"cos\nsystem\n(S'touch " + str(tmp_path / "x").encode() + b"'\ntR.")
    decoded(b"(S'touch " + str(tmp_path / "x").encode() + b"'\nios\nsystem\n.")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "key", [2**64, (2**64,), (1,) * 101, ((1,),), (frozenset(),), frozenset()]
)
def test_keys_that_take_long_to_compare_are_refused(key):
    with pytest.raises(FormatError, match=r"x\.pkl has a key that is a nested or long"):
        decoded(pickle.dumps({key: 1}))


def test_a_decoder_that_ends_is_replaced():
    assert decoded(pickle.dumps(1)) == 1
    process = plain_pickle._WORKER._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert decoded(pickle.dumps(2)) == 2
    assert plain_pickle._WORKER._process is not process


def test_a_decoder_that_was_idle_ends_and_is_replaced(monkeypatch):
    monkeypatch.setattr(plain_pickle, "_IDLE_SECS", 0.1)
    plain_pickle._WORKER.stop()
    decoded(pickle.dumps(1))
    process = plain_pickle._WORKER._process
    assert process.wait() == 0
    assert decoded(pickle.dumps(2)) == 2


def test_a_decoder_that_a_late_signal_of_the_pipe_ends_is_asked_again(monkeypatch):
    # The kernel sent it once in 340,000 requests on a machine with much to do.
    asked, requests = plain_pickle._Worker._asked, []

    def asked_late(worker, request, content):
        requests.append(request)
        if len(requests) > 1:
            return asked(worker, request, content)
        os.kill(worker._running().pid, signal.SIGIO)
        worker._process.wait()
        return None

    monkeypatch.setattr(plain_pickle._Worker, "_asked", asked_late)
    assert decoded(pickle.dumps(3)) == 3
    assert len(requests) == 2


PARENT = """
import os, pickle, sys, threading
from elastic_ckpt.universal.formats import plain_pickle
from elastic_ckpt.universal.formats.source_budget import SourceBudget

def decode(content):
    return plain_pickle.value(
        content, file="x", budget=SourceBudget(), names={}, tensor=list
    )

decode(pickle.dumps(1))
print(plain_pickle._WORKER._process.pid, flush=True)
if sys.argv[1] == "forks":
    if os.fork() == 0:
        assert decode(pickle.dumps(2)) == 2
        os._exit(0)
    os.wait()
elif sys.argv[1] == "works":
    keys = (n * (2**61 - 1) for n in range(2**70, 2**70 + 100_000))
    items = b"".join(b"\\x8a\\x20" + key.to_bytes(32, "little") + b"N" for key in keys)
    threading.Thread(
        target=decode, args=[b"\\x80\\x04}(" + items + b"u."], daemon=True
    ).start()
    while plain_pickle._WORKER._lock.acquire(blocking=False):
        plain_pickle._WORKER._lock.release()
    print("working", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["waits", "works", "forks"])
def test_a_killed_parent_leaves_no_process_behind(state):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pid = int(parent.stdout.readline())
        if state == "works":
            assert parent.stdout.readline() == "working\n"
        status = pathlib.Path(f"/proc/{pid}/stat")
        assert status.exists()
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60
    while status.exists() and status.read_text().split()[2] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_long_names_that_many_values_share_take_little_memory(monkeypatch):
    monkeypatch.setattr(source_budget, "MOST_BYTES", 1 << 24)
    value = {"x" * 1_000_000: {number: number for number in range(10_000)}}
    with pytest.raises(FormatError, match=r"x\.pt has values that take over"):
        plain_values.flatten(value, file="x.pt")


def test_json_of_too_many_values_is_refused_before_it_is_parsed():
    content = b'{"a": [' + b"[0]," * 5_000_000 + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"x\.json has about 15\d+ values"):
            source_files.parse_json(content, "x.json")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
