"""Several small files that stand for much together are refused within the limits.

The limits of `process_limits` hold in all tests here, of which the default ones allow
less memory.
"""

import resource

import pytest

from elastic_ckpt.integrations import forgather
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import (
    optimizer_states,
    plain_pickle,
    source_budget,
    torch_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.optimizer_states import Range
from elastic_ckpt.universal.formats.torch_file import TorchFile
from tests.universal.formats import dcp_files, process_limits, torch_files

FILE = "model_optim_rng.pt"


@pytest.fixture(params=[6, pytest.param(0, marks=pytest.mark.slow)])
def less(request, monkeypatch):
    """The power of two by which less memory is allowed."""
    most = source_budget.MOST_BYTES >> request.param
    monkeypatch.setattr(source_budget, "MOST_BYTES", most)
    return request.param


def ranks(directory, values, **options):
    """A file of a Megatron rank for each value; shared parts are kept once."""
    for rank, value in enumerate(values):
        folder = directory / f"mp_rank_{rank:02}"
        folder.mkdir(parents=True)
        torch_files.write(folder / FILE, value, **options)
    return directory


def refused(path, match):
    with pytest.raises(FormatError, match=match) as error:
        opening.open_checkpoint(path)
    assert str(path) in str(error.value)


def doubled(value, times):
    """A value that refers to itself twice, again and again."""
    for _ in range(times):
        value = {"a": value, "b": value}
    return value


def slow_pickle(secs):
    """A pickle that takes about so many seconds: keys of equal hashes."""
    count = int(9_000 * secs**0.5)
    keys = (n * (2**61 - 1) for n in range(2**70, 2**70 + count))
    items = b"".join(b"\x8a\x20" + key.to_bytes(32, "little") + b"N" for key in keys)
    return b"\x80\x04}(" + items + b"u."


@pytest.mark.slow
def test_seconds_of_all_files_count_together(tmp_path, monkeypatch):
    monkeypatch.setattr(source_budget, "MOST_SECS", 1)
    ranks(tmp_path / "bad", [None] * 4, content=slow_pickle(2))
    plain_pickle._WORKER.stop()
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    refused(
        tmp_path / "bad", rf"mp_rank_0\d/{FILE} (has a pickle that takes|has a key)"
    )
    plain_pickle._WORKER.stop()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime - began.ru_utime < 5
    ranks(tmp_path / "one", [{"model": {"w": torch_files.tensor()}}])
    opening.open_checkpoint(tmp_path / "one")


def test_values_of_all_files_count_together(tmp_path, less):
    ranks(tmp_path / "good", [{"model": {}, "args": doubled({}, 17 - less)}] * 2)
    opening.open_checkpoint(tmp_path / "good")
    ranks(tmp_path / "bad", [{"model": {}, "args": doubled({}, 17 - less)}] * 20)
    refused(tmp_path / "bad", f"{FILE} has values that take over")


@pytest.mark.night
def test_states_of_all_ranks_count_together(tmp_path, less):
    value = doubled({}, 18 - less)
    for rank in range(10):
        torch_files.write(tmp_path / f"rng_state_rank_{rank}.pt", value)
    checkpoint = forgather.Checkpoint.open(tmp_path)
    with pytest.raises(FormatError, match=r"_rank_\d\.pt has values that take over"):
        checkpoint.states("rng")


def test_pickles_in_holes_are_refused(tmp_path):
    size = 8 << 20
    content = b"\x80\x04X" + size.to_bytes(4, "little") + bytes(size) + b"."
    ranks(tmp_path, [None] * 3, content=content)
    for path in tmp_path.rglob(FILE):
        held = path.read_bytes()
        at = held.index(content[:7]) + 7
        with path.open("wb") as file:
            file.write(held[:at])
            file.seek(at + size)
            file.write(held[at + size :])
    refused(tmp_path, f"{FILE} has a pickle of .* that are no holes")


def test_metadata_in_a_hole_is_refused(tmp_path):
    path = dcp_files.parts().write(tmp_path / "x")
    with (path / ".metadata").open("r+b") as file:
        file.truncate(100 << 20)
    refused(path, r"\.metadata has holes")


def test_names_under_long_keys_of_modules_are_refused(tmp_path, less):
    weights = {f"w{number}": torch_files.tensor() for number in range(500)}
    content = {"model": {"m" * (1_000_000 >> less): weights}}
    refused(ranks(tmp_path, [content]), f"{FILE} has values that take over")


def test_names_under_long_keys_of_common_values_are_refused(tmp_path, less):
    path = dcp_files.parts().write(tmp_path / "x")
    weights = {f"w{number}": torch_files.tensor() for number in range(500)}
    torch_files.write(path / "common.pt", {"m" * (1_000_000 >> less): weights})
    refused(path, r"common\.pt has values that take over")


def test_long_keys_of_distributed_values_are_refused(tmp_path, less):
    parts = dcp_files.parts()
    key = "k" * (1_000_000 >> less)
    for number in range(500):
        parts.entries[f"w{number}"] = dcp_files.entry((0,), [])
        parts.paths[f"w{number}"] = (key, number)
    refused(
        parts.write(tmp_path / "x"),
        r"\.metadata (holds values that take too much|has values that take over"
        "|has a pickle that takes over)",
    )


@pytest.mark.night
def test_values_of_many_parameters_are_refused(tmp_path, less):
    value = {
        "param": torch_files.tensor(),
        "facts": doubled({"k" * 1000: 1}, 13 - less),
    }
    for number in range(30):
        folder = tmp_path / "zero" / f"w{number}"
        folder.mkdir(parents=True)
        torch_files.write(folder / "fp32.pt", value)
    torch_files.write(tmp_path / "mp_rank_00_model_states.pt", {"module": {}})
    refused(tmp_path, r"fp32\.pt has values that take over")


def test_ranges_of_parameters_of_many_dims_are_refused(tmp_path, less):
    shape = (2,) * 40 + (1,) * 24
    path = tmp_path / "x.pt"
    file = TorchFile(path=str(path), value=None)
    elements = {"entries": {"data/0": bytes(400)}}
    tensor = torch_files.tensor((100,), (1,), elements=100)
    flat = torch_file.read(torch_files.write(path, tensor, **elements)).value
    # Each range has boxes for most dims, as the numbers of its ends are odd.
    numel, count = 2**40, 6000 >> less
    sizes = [numel // count // 2 * 2 + 1, *[numel // count // 2 * 2] * (count - 2)]
    sizes.append(numel - sum(sizes))
    ranges = [Range(file=file, flat=flat, start=0, numel=each) for each in sizes]
    with pytest.MonkeyPatch.context() as patch, process_limits.limited():
        # The values would take too much disk.
        patch.setattr(optimizer_states, "_check", lambda *_: None)
        with pytest.raises(FormatError, match=r"x\.pt has values that take over"):
            optimizer_states.fragments(shape, ranges, "w")
