"""`elastic-ckpt data DIRECTORY FILE`: text files in, one ArrayRecord file out."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "directory",
        help="a directory of text files, or python-stdlib for Python's own sources",
    )
    parser.add_argument("file", help="the ArrayRecord file to write")


def run(arguments: argparse.Namespace) -> int:
    """Writes the file and says what is in it."""
    from elastic_ckpt.data import text

    written = text.write_arrayrecord(arguments.directory, arguments.file)
    print(
        f"{arguments.file}: {written.num_documents:,} documents,"
        f" {written.text_bytes:,} bytes of text"
    )
    return 0
