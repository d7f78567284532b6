"""Packs text with encoded images or audio, which are decoded once they are in a row.

A document is a list of parts: tokens, and encoded media that each take the place of
some tokens. Documents are packed whole into rows, within limits on tokens and media. A
user's function decodes only the media in delivered rows, into arrays of the fixed shape
that JAX needs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grain
import numpy as np
import xxhash

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.lm import rows as lm_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modality:
    """A kind of media in rows, such as images.

    Attributes:
      decode: a function that decodes bytes to an array, resized or padded to `shape`.
      shape: the shape of the array.
      max_per_row: the maximum number of media of this kind per row, M.
      dtype: the dtype of the array.
    """

    decode: Callable[[bytes], np.ndarray]
    shape: tuple[int, ...]
    max_per_row: int
    dtype: str = "uint8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """An encoded image or audio clip within a document.

    Attributes:
      modality: the modality name.
      data: the bytes of an image or audio file.
      num_tokens: the number of tokens that the model puts in place of the image
        or clip.
      placeholder: the token that stands for each of these tokens.
    """

    modality: str
    data: bytes
    num_tokens: int
    placeholder: int


# Suffixes of the features of a modality.
_ENDS = ("", "_segmentation", "_start", "_length")
# The media of each modality, each with the index of its first token in the document.
_Media: TypeAlias = dict[str, list[tuple[int, Encoded]]]


class MultimodalRows(lm_rows.Rows):
    """Packs documents of text and media into rows of `length` tokens.

    A row has the features of `ec.data.lm.Rows`. Its `inputs` are all tokens of its
    documents, and each target is the next token; where the next token is a placeholder,
    and at the last token, `targets` and `targets_segmentation` are 0. For a modality
    `images` with M media per row and arrays of shape `[...]`, a row also has

    * `images`, `[M, ...]`: the decoded media in row order, then zeros;
    * `images_segmentation`, int32 `[M]`: the document of each medium, as in
      `inputs_segmentation`; 0 where there is no medium;
    * `images_start` and `images_length`, int32 `[M]`: the index in the row of each
      medium's first token, and the medium's number of tokens.

    A document that does not fit into an empty row is truncated before the first token
    or medium that does not fit. A document without text after its first token is
    dropped.

    Args:
      parent: a dataset of documents, which are lists of parts: `Encoded` media, and
        tokens as arrays or lists of integers.
      modalities: the modalities by name; each name is also the name of a row feature.
      packing: `"first_fit"` or `"best_fit"`; `"concat_then_split"` would split media.
      **settings: other arguments of `ec.data.lm.Rows`, such as `length`, `window`,
        `seed`, `shard` and `max_examples`.

    Raises:
      ConfigError: if `packing` is invalid, or if a modality has no room in a row or has
        a name that clashes with another feature.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        *,
        modalities: Mapping[str, Modality],
        packing: str = lm_rows.FIRST_FIT,
        **settings: Any,
    ) -> None:
        if packing not in (lm_rows.FIRST_FIT, lm_rows.BEST_FIT):
            raise errors.ConfigError(
                f"MultimodalRows: packing={packing!r}; choose first_fit or best_fit,"
                " which keep documents and their media whole"
            )
        names = [*lm_rows.FEATURES]
        names += [name + end for name in modalities for end in _ENDS]
        least = min((each.max_per_row for each in modalities.values()), default=1)
        if least < 1 or len({*names}) < len(names):
            raise errors.ConfigError(
                f"MultimodalRows: modalities={dict(modalities)!r}; set max_per_row to 1"
                " or more for each, and choose names that do not clash with the row"
                f" features {names}"
            )
        super().__init__(parent, packing=packing, **settings)
        self.modalities = dict(modalities)

    def __iter__(self) -> lm_rows.RowsIterator:
        return _MultimodalIterator(self)

    def settings(self) -> dict[str, storage.Json]:
        """See `Rows`; includes the modalities without their `decode`."""
        kinds = {
            name: {"max_per_row": m.max_per_row, "shape": [*m.shape], "dtype": m.dtype}
            for name, m in self.modalities.items()
        }
        return super().settings() | {"modalities": kinds}


@dataclasses.dataclass(frozen=True)
class _Document:
    # The parts as read; the tokens (complements where not targets); and the media.
    parts: list[Any]
    tokens: np.ndarray
    media: _Media


class _MultimodalIterator(lm_rows.RowsIterator):
    of: Any  # MultimodalRows

    def hold(self, documents: list[Any]) -> lm_rows.Held:
        whole = list(map(self._checked, documents))
        held = super().hold([document.tokens for document in whole])
        return held._replace(documents=whole)

    def _checked(self, parts: Any) -> _Document:
        media: _Media = {name: [] for name in self.of.modalities}
        pieces, length = [np.empty(0, np.int32)], self.of.length
        for part in parts:
            start = sum(map(len, pieces))
            if isinstance(part, Encoded):
                if part.modality not in media or part.num_tokens < 1:
                    raise errors.DataError(
                        f"a document has media with modality {part.modality!r} and"
                        f" num_tokens={part.num_tokens}; modality must be one of"
                        f" {sorted(media)}, and num_tokens at least 1"
                    )
                of_kind = media[part.modality]
                is_full = len(of_kind) == self.of.modalities[part.modality].max_per_row
                if is_full or start + part.num_tokens > length:
                    break
                of_kind.append((start, part))
                pieces.append(np.full(part.num_tokens, ~part.placeholder, np.int32))
            else:
                piece = token_numbers.narrowed(part, place="a part of a document")
                pieces.append(piece[: length - start])
        tokens = np.concatenate(pieces)
        if not (tokens[1:] >= 0).any():
            return _Document(parts, tokens[:0], media)
        # The last token is also an input; its target has no loss.
        tokens = np.append(tokens, np.int32(~token_numbers.PAD))
        return _Document(parts, tokens, media)

    def _digest(self, held: lm_rows.Held) -> str:
        digest = xxhash.xxh3_64(super()._digest(held).encode())
        for document in held.documents:
            for _, medium in itertools.chain(*document.media.values()):
                digest.update(medium.data)
        return digest.hexdigest() if held.documents else ""

    def cut(self, held: lm_rows.Held, first: int, stop: int) -> list[Any]:
        del stop  # documents are never split
        (number,) = _numbers(held, [first])
        return held.documents[number].parts

    def costs(self, held: lm_rows.Held, at: np.ndarray) -> list[tuple[int, ...]]:
        more = [held.documents[n].media.values() for n in _numbers(held, at)]
        return [
            (*cost, *map(len, media))
            for cost, media in zip(super().costs(held, at), more, strict=True)
        ]

    def limits(self) -> tuple[int, ...]:
        return (
            *super().limits(),
            *(m.max_per_row for m in self.of.modalities.values()),
        )

    def more(self, rows: Sequence[lm_rows.Unmade | None]) -> lm_rows.Row:
        more: lm_rows.Row = {}
        for name, modality in self.of.modalities.items():
            shape = len(rows), modality.max_per_row
            decoded = np.zeros((*shape, *modality.shape), modality.dtype)
            segments, starts, lengths = np.zeros((3, *shape), np.int32)
            for of_row, row in enumerate(rows):
                number = begin = 0
                held, pieces = row or lm_rows.NONE
                numbers = _numbers(held, [at for at, _ in pieces])
                for segment, place in enumerate(numbers, 1):
                    document = held.documents[place]
                    for start, medium in document.media[name]:
                        at = of_row, number
                        decoded[at] = _decoded(name, modality, medium.data)
                        segments[at], starts[at] = segment, begin + start
                        lengths[at] = medium.num_tokens
                        number += 1
                    begin += len(document.tokens) - 1
            more |= {
                name: decoded,
                f"{name}_segmentation": segments,
                f"{name}_start": starts,
                f"{name}_length": lengths,
            }
        return more


def _numbers(held: lm_rows.Held, at: Sequence[int] | np.ndarray) -> list[int]:
    # The indexes of the documents that begin at these tokens. If more than one begins
    # at the same token, only the last of them is not empty.
    return (np.searchsorted(held.starts, at, side="right") - 1).tolist()


def _decoded(name: str, modality: Modality, data: bytes) -> np.ndarray:
    array = np.asarray(modality.decode(data))
    if array.shape != modality.shape or array.dtype != np.dtype(modality.dtype):
        raise errors.DataError(
            f"decode of modality {name!r} returned {array.dtype}{list(array.shape)},"
            f" but its Modality declares {modality.dtype}{list(modality.shape)};"
            " resize, pad or convert the array in decode"
        )
    return array
