"""Files that go bad: one bit, all of them, their end, or all at once."""

import os
import pathlib
import re
import shutil

KINDS = ("flipped", "cut short", "emptied", "removed", "swapped", "scrambled")
# Files that change all the time, and are no part of a step.
_PASSING = re.compile(r"(^|/)(lock|restored)(/|$)")


def contents(root):
    """The files of steps below `root`, by path."""
    return {
        path: pathlib.Path(root, path).read_bytes()
        for path in sorted(_paths(root))
        if not _PASSING.search(path)
    }


def put_back(root, kept):
    """Makes the files below `root` what `contents` found."""
    for path, content in contents(root).items():
        if path not in kept:
            pathlib.Path(root, path).unlink()
        elif content != kept[path]:
            pathlib.Path(root, path).write_bytes(content)
    for path, content in kept.items():
        file = pathlib.Path(root, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    shutil.rmtree(pathlib.Path(root, "restored"), ignore_errors=True)


def spoil(file, kind, random, *, other):
    """Spoils a file.

    Args:
      file: its path.
      kind: one of `KINDS`.
      random: chooses where.
      other: what it may be swapped with: the content of the same file of another step.

    Returns:
      Where its bytes differ first; -1 if it is gone.
    """
    before = pathlib.Path(file).read_bytes()
    after = bytearray(before)
    match kind:
        case "flipped":
            after[random.randrange(len(after))] ^= 1 << random.randrange(8)
        case "cut short":
            del after[random.randrange(len(after)) :]
        case "emptied":
            after.clear()
        case "swapped":
            after[:] = other
        case "scrambled":
            after[:] = random.randbytes(len(after))
        case "removed":
            os.unlink(file)
            return -1
    # In place, as memory goes bad.
    with open(file, "r+b") as opened:
        opened.truncate(len(after))
        opened.write(after)
    pairs = zip(before, after, strict=False)
    differing = (n for n, (old, new) in enumerate(pairs) if old != new)
    return next(differing, min(len(before), len(after)))


def change_first_byte(file):
    """Spoils a file in place, so that to do it again does not mend it."""
    with open(file, "r+b") as opened:
        first = opened.read(1)[0]
        opened.seek(0)
        opened.write(bytes([(first + 1) % 256]))


def _paths(root):
    for directory, _, names in os.walk(root):
        for name in names:
            yield os.path.relpath(os.path.join(directory, name), root)
