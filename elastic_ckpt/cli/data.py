"""`elastic-ckpt data DIRECTORY FILE`: text files in, one training file out."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "directory",
        help="a directory of text files, or python-stdlib for Python's own sources",
    )
    parser.add_argument("file", help="the file to write")
    parser.add_argument(
        "--type",
        default="arrayrecord",
        choices=("arrayrecord", "parquet", "tfrecord"),
        help="its format; a text a record, in Parquet in the column text",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file and says what is in it."""
    from elastic_ckpt.data import text

    written = text.write(arguments.directory, arguments.file, file_type=arguments.type)
    print(
        f"{arguments.file}: {written.num_documents:,} documents,"
        f" {written.text_bytes:,} bytes of text"
    )
    return 0
