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
        choices=("arrayrecord", "parquet", "tfrecord"),
        help="its format, a text a record, in Parquet in the column text; without it,"
        " as the file's name ends (.parquet, .tfrecord), else arrayrecord",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file and prints what it contains."""
    from elastic_ckpt.data import text

    file_type = arguments.type or text.file_type(arguments.file) or "arrayrecord"
    written = text.write(arguments.directory, arguments.file, file_type=file_type)
    print(
        f"{arguments.file}: {written.num_documents:,} documents,"
        f" {written.text_bytes:,} bytes of text, as {file_type}"
    )
    return 0
