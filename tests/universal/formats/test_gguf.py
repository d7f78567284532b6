"""GGUF files lead to the values that llama.cpp's package wrote (`write_weights.py`)."""

import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats.fragment_values import values_of

DATA = pathlib.Path(__file__).parent / "data" / "weights"
PLAIN = DATA / "plain.gguf"


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(*, tensors=(), values=(), version=3, count=None):
    """The header of a file; `values` are pairs of keys and bytes."""
    parts = [b"GGUF", struct.pack("<I", version)]
    parts.append(
        struct.pack("<QQ", len(tensors) if count is None else count, len(values))
    )
    parts += [text(key) + value for key, value in values]
    for name, dims, kind, offset in tensors:
        parts.append(text(name) + struct.pack("<I", len(dims)))
        parts.append(struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset))
    content = b"".join(parts)
    return content + bytes(-len(content) % 32)


def refused(path, content, match):
    path.write_bytes(content)
    with pytest.raises(FormatError, match=match) as error:
        opening.open_checkpoint(path)
    assert str(path) in str(error.value)


def test_tensors_of_every_plain_type_are_read_bit_equal():
    checkpoint = opening.open_checkpoint(PLAIN)
    assert checkpoint.format == "GGUF"
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    vector = tensors.pop("vector")
    assert values_of(vector).tolist() == [0, 1, 2, 3, 4]
    kinds = ("float32", "float16", "float64", "int8", "int16", "int32", "int64")
    assert set(tensors) == {f"{kind}.weight" for kind in (*kinds, "bfloat16")}
    whole = np.arange(6).reshape(2, 3)
    for name, tensor in tensors.items():
        array = whole.astype(np.dtype(name.removesuffix(".weight")))
        values = values_of(tensor)
        assert (values.dtype, values.shape) == (array.dtype, (2, 3))
        assert values.tobytes() == array.tobytes(), name
    assert tensors["bfloat16.weight"].dtype == ml_dtypes.bfloat16
    assert checkpoint.check([str(PLAIN)]) == [str(PLAIN)]


def test_metadata_are_values():
    assert opening.open_checkpoint(PLAIN).values == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "kinds.uint8": 1,
        "kinds.int8": -1,
        "kinds.uint16": 2,
        "kinds.int16": -2,
        "kinds.int32": -3,
        "kinds.uint64": 2**40,
        "kinds.int64": -(2**40),
        "kinds.float32": 0.5,
        "kinds.float64": 0.25,
        "kinds.bool": True,
        "tokenizer.ggml.tokens": ["a", "bé", "c"],
        "tokenizer.ggml.scores": [0.5, 1.5, 2.5],
    }


def test_quantized_tensors_are_refused_by_name():
    with pytest.raises(
        FormatError, match=r"has blk\.0\.attn_q\.weight quantized as Q8"
    ):
        opening.open_checkpoint(DATA / "quantized.gguf")


def test_parts_of_a_model_are_joined(tmp_path):
    split = ("split.count", struct.pack("<IH", 2, 2))
    for number in range(2):
        path = tmp_path / f"x-0000{number + 1}-of-00002.gguf"
        content = header(tensors=[(f"w{number}", (2,), 0, 0)], values=[split])
        path.write_bytes(content + struct.pack("<2f", number, 7))
    tensors = opening.open_checkpoint(tmp_path).tensors
    assert [values_of(each).tolist() for each in tensors] == [[0, 7], [1, 7]]
    with pytest.raises(FormatError, match="has 1 of the 2 files of a model"):
        opening.open_checkpoint(path)


FLOATS = ("w", (2, 2), 0, 0)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"GGML" + bytes(100), "is no GGUF file"),
        (header(version=1), "has version 1"),
        (header(version=3 << 24), "little-endian"),
        (header(count=2**40), "cut short"),
        (header(tensors=[FLOATS]), "is cut short: it has"),
        (header(tensors=[("w", (2,) * 5, 0, 0)]), "w of 5 dims"),
        (header(tensors=[("w", (2**40, 2**40), 0, 0)]), "too large"),
        (header(tensors=[("w", (2,), 99, 0)]), "w quantized as type 99"),
        (header(tensors=[("w", (2,), 0, 2**63)]), "is cut short"),
        (header(tensors=[FLOATS, FLOATS]) + bytes(16), "two tensors of a name"),
        (header(values=[("a", struct.pack("<IB", 0, 1))] * 2), "key a twice"),
        (header(values=[("a", struct.pack("<I", 50))]), "unknown kind 50"),
        (header(values=[("a", struct.pack("<IIQ", 9, 9, 1))]), "a list of the kind 9"),
        (header(values=[("a", struct.pack("<IIQ", 9, 8, 2**60))]), "cut short"),
        (
            header(values=[("a", struct.pack("<IIQ", 9, 4, 2**60))]),
            "take over|cut short",
        ),
        (
            header(values=[("general.alignment", struct.pack("<II", 4, 0))]),
            "alignment 0",
        ),
        (header(values=[("k" * 70_000, struct.pack("<IB", 0, 1))]), "a key of 70000"),
    ],
)
def test_lying_headers_are_refused(tmp_path, content, match):
    refused(tmp_path / "x.gguf", content, match)


def test_a_file_that_was_cut_short_is_refused_at_every_length(tmp_path):
    content = PLAIN.read_bytes()
    # The last tensor is padded.
    for length in range(0, len(content) - 32, 17):
        refused(tmp_path / "x.gguf", content[:length], "cut short|no GGUF")
