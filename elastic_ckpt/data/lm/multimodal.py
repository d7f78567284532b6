"""Packs text with encoded images or audio, which are decoded once they are in a row.

A document is a list of parts: tokens, and encoded media that take the place of a number
of tokens. Grain's packers fit whole documents into rows by their tokens and by how many
media a row may have. What they carry of a medium is a reference to its bytes, and a
packer's state has neither: a resumed one reads the documents in its buffer again. Only
the media in rows that are delivered are decoded, by a function of the user's, to arrays
of one shape, as JAX needs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grain
import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.lm import language

_TEXT = ("inputs", "targets", "has_target")
# Of each modality: the bytes, the first token in the document, the number of tokens.
_OF_MEDIA = ("", "_start", "_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modality:
    """A kind of media in rows, such as images.

    Attributes:
      decode: makes an array of the encoded bytes; also resizes or pads it to `shape`.
      shape: of that array, the same for all.
      max_per_row: the most media of this kind in a row, M.
      dtype: of that array.
    """

    decode: Callable[[bytes], np.ndarray]
    shape: tuple[int, ...]
    max_per_row: int
    dtype: str = "uint8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """An encoded medium within a document.

    Attributes:
      modality: the name of its kind.
      data: the bytes of an image or audio file.
      num_tokens: how many tokens the model puts in its place, by its size or duration.
      placeholder: the token that stands for each of them.
    """

    modality: str
    data: bytes
    num_tokens: int
    placeholder: int


Part: TypeAlias = Encoded | np.ndarray | Sequence[int]


def packed_multimodal(
    parent: grain.IterDataset,
    *,
    modalities: Mapping[str, Modality],
    packing: str = language.FIRST_FIT,
    length: int,
    seed: int,
    max_examples: int = 0,
) -> grain.IterDataset:
    """Packs documents of text and media into rows of `length` tokens.

    A row has the features of `ec.data.lm.packed`. Its `inputs` are all tokens of a
    document, and its `targets` the tokens after them; `targets_segmentation` is 0 where
    the target is a placeholder, and after the last token. For a modality `images` with
    M media a row and arrays of shape `[...]`, it also has

    * `images`, `[M, ...]`: the decoded media in the order of the row, then zeros;
    * `images_segmentation`, int32 `[M]`: their documents, as in `inputs_segmentation`;
      0 where there is none;
    * `images_start` and `images_length`, int32 `[M]`: the index in the row of their
      first token, and the number of their tokens.

    A document that does not fit into an empty row ends before the first token, or
    medium, that does not fit.

    Args:
      parent: documents, lists of parts: `Encoded` media, and tokens, arrays or lists of
        integers.
      modalities: the kinds of media by name; rows have features of these names.
      packing: `"first_fit"` or `"best_fit"`. There is no `"concat_then_split"`, because
        it would cut media.
      length: tokens of a row, L.
      seed: the seed of the order in which packers yield rows.
      max_examples: the most documents in a row; 0 sets no limit.

    Raises:
      ConfigError: if `packing` is another one, or two features have the same name.
    """
    if packing not in language.FITTING:
        raise errors.ConfigError(
            f"packed_multimodal: packing={packing!r}; choose one of"
            f" {', '.join(language.FITTING)}, which keep documents and their media"
            " whole"
        )
    added = [
        name + end
        for name in modalities
        for end in ("", "_segmentation", "_start", "_length")
    ]
    names = [*language.ROW_NAMES.values(), "has_target", *added]
    if clashing := {name for name in added if names.count(name) > 1}:
        raise errors.ConfigError(
            f"packed_multimodal: rows would have {sorted(clashing)} twice; rename a"
            " modality"
        )
    lengths = dict.fromkeys(_TEXT, length)
    for name, modality in modalities.items():
        if modality.max_per_row < 1:
            raise errors.ConfigError(
                f"packed_multimodal: modality {name!r} has"
                f" max_per_row={modality.max_per_row}; give 1 or more"
            )
        lengths |= {name + end: modality.max_per_row for end in _OF_MEDIA}
    documents = parent.map(
        functools.partial(_features, modalities=modalities, length=length)
    )
    rows = language.FITTING[packing](
        documents.filter(_has_target),
        length_struct=lengths,
        num_packing_bins=language.PACKING_BINS,
        seed=seed,
        max_sequences_per_bin=max_examples or None,
    )
    return rows.map(functools.partial(_row, modalities=modalities))


def _features(
    parts: Sequence[Part], *, modalities: Mapping[str, Modality], length: int
) -> dict[str, np.ndarray]:
    # What the packer packs of a document: arrays of its tokens, and of its media.
    if not isinstance(parts, list | tuple):
        raise errors.DataError(
            f"packed_multimodal: a document is a {type(parts).__name__}; make it a list"
            " of parts, ec.data.lm.Encoded media and arrays of tokens"
        )
    media: dict[str, list[tuple[bytes, int, int]]] = {name: [] for name in modalities}
    pieces, are_text, start = [], [], 0
    for part in parts:
        if isinstance(part, Encoded):
            _check(part, modalities)
            of_kind = media[part.modality]
            is_full = len(of_kind) == modalities[part.modality].max_per_row
            if is_full or start + part.num_tokens > length:
                break
            of_kind.append((part.data, start, part.num_tokens))
            piece = np.full(part.num_tokens, part.placeholder, np.int32)
        else:
            place = "packed_multimodal: a part of tokens"
            piece = token_numbers.narrowed(_integers(part), place=place)
            piece = piece[: length - start]
        pieces.append(piece)
        are_text.append(np.full(len(piece), not isinstance(part, Encoded), np.int32))
        start += len(piece)
    inputs = np.concatenate([np.empty(0, np.int32), *pieces])
    is_text = np.concatenate([np.empty(0, np.int32), *are_text])
    features = {
        "inputs": inputs,
        "targets": np.append(inputs[1:], np.int32(0))[: len(inputs)],
        "has_target": np.append(is_text[1:], np.int32(0))[: len(inputs)],
    }
    for name, of_kind in media.items():
        references = np.empty(len(of_kind), object)
        references[:] = [data for data, _, _ in of_kind]
        features[name] = references
        numbers = np.array([each[1:] for each in of_kind], np.int32).reshape(-1, 2)
        features[f"{name}_start"], features[f"{name}_length"] = numbers.T
    return features


def _check(part: Encoded, modalities: Mapping[str, Modality]) -> None:
    if part.modality not in modalities:
        raise errors.DataError(
            f"packed_multimodal: a document has a medium of modality {part.modality!r},"
            f" but modalities= has only {sorted(modalities)}"
        )
    if part.num_tokens < 1:
        raise errors.DataError(
            f"packed_multimodal: a medium of modality {part.modality!r} has"
            f" num_tokens={part.num_tokens}; give 1 or more, or leave it out"
        )


def _integers(part: Any) -> np.ndarray:
    numbers = np.asarray(part, None if len(part) else np.int32)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise errors.DataError(
            f"packed_multimodal: a part has {numbers.dtype}{list(numbers.shape)}; parts"
            " are ec.data.lm.Encoded media, and arrays of tokens"
        )
    return numbers


def _has_target(document: Mapping[str, np.ndarray]) -> bool:
    return bool(document["has_target"].any())


def _row(
    packed: Mapping[str, Any], *, modalities: Mapping[str, Modality]
) -> dict[str, np.ndarray]:
    segments = packed["inputs_segment_ids"]
    row = {name: packed[packers] for packers, name in language.ROW_NAMES.items()}
    row["targets_segmentation"] = segments * packed["has_target"]
    for name, modality in modalities.items():
        of_media = packed[f"{name}_segment_ids"]
        decoded = np.zeros((len(of_media), *modality.shape), modality.dtype)
        starts = np.zeros(len(of_media), np.int32)
        for number in np.flatnonzero(of_media):
            decoded[number] = _decoded(name, modality, packed[name][number])
            first = int(np.argmax(segments == of_media[number]))
            starts[number] = first + packed[f"{name}_start"][number]
        row |= {
            name: decoded,
            f"{name}_segmentation": of_media,
            f"{name}_start": starts,
            f"{name}_length": packed[f"{name}_length"],
        }
    return row


def _decoded(name: str, modality: Modality, data: bytes) -> np.ndarray:
    try:
        array = np.asarray(modality.decode(data))
    except Exception as error:
        error.add_note(f"while a medium of modality {name!r} was decoded")
        raise
    if array.shape != modality.shape or array.dtype != np.dtype(modality.dtype):
        raise errors.DataError(
            f"decode of modality {name!r} made {array.dtype}{list(array.shape)}, and"
            f" its Modality says {modality.dtype}{list(modality.shape)}; resize, pad or"
            " convert in decode"
        )
    return array
