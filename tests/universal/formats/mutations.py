"""Changes bytes of files at random, also inside of checked parts of zips."""

import binascii
import random

from elastic_ckpt.universal.formats import stored_zip
from elastic_ckpt.universal.formats.format_error import FormatError

# Numbers at which sizes and signs change.
_EDGES = (0, 1, 0x7F, 0x80, 0xFF)
_OPCODES = b"()]}.0acehjqrstuRQbBCGJKMNX\x81\x85\x86\x87\x8a\x8c\x8f\x90\x91\x93\x94"


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to four changes of the same length, or one of another."""
    if not content:
        return b"x"
    changed = bytearray(content)
    if rng.random() < 0.2:
        start, size = rng.randrange(len(content)), rng.randrange(1, 64)
        part = content[start : start + size]
        if rng.random() < 0.5:
            del changed[start : start + size]
        else:
            changed[start:start] = part * rng.randrange(1, 4)
        return bytes(changed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(content))
        kind = rng.random()
        if kind < 0.3:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind < 0.5:
            changed[at] = rng.choice(_EDGES)
        elif kind < 0.8:
            changed[at] = rng.choice(_OPCODES)
        else:
            # A part from elsewhere.
            size, other = rng.randrange(1, 16), rng.randrange(len(content))
            part = content[other : other + size][: len(content) - at]
            changed[at : at + len(part)] = part
    return bytes(changed)


def mutated_pickle(path, rng: random.Random) -> bytes:
    """The file with changes in a pickle that it holds, whose CRC-32 is made to fit.

    Raises:
      FormatError: if it holds none.
    """
    content = bytearray(path.read_bytes())
    entries = stored_zip.entries(
        lambda start, size: bytes(content[start : start + size]),
        begin=0,
        size=len(content),
        stored_bytes=len(content),
        place=str(path),
        writer="a test",
    )
    pickles = [entries[name] for name in entries if name.endswith("data.pkl")]
    if not pickles:
        raise FormatError(f"{path} has no pickle")
    entry = pickles[0]
    pickled = bytes(content[entry.start : entry.start + entry.size])
    changed = mutated(pickled, rng)[: entry.size].ljust(entry.size, b".")
    content[entry.start : entry.start + entry.size] = changed
    # The directory, behind all entries, has the number that counts.
    at = content.rindex(entry.crc.to_bytes(4, "little"))
    content[at : at + 4] = binascii.crc32(changed).to_bytes(4, "little")
    return bytes(content)
