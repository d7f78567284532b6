"""`elastic-ckpt data DIRECTORY FILE`: text files in, one training file out."""

from __future__ import annotations

import argparse

from elastic_ckpt.data.lm import text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "directory",
        help="a local directory of text files, or python-stdlib for Python's own"
        " sources",
    )
    parser.add_argument("file", help="the file to write")
    parser.add_argument(
        "--type",
        choices=("arrayrecord", "parquet"),
        help="the file format; by default parquet if FILE ends in .parquet,"
        " otherwise arrayrecord. Each document is a record, in Parquet in the column"
        " text",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file and prints what it contains."""
    file_type = arguments.type or text.file_type(arguments.file) or "arrayrecord"
    written = text.write(arguments.directory, arguments.file, file_type=file_type)
    print(
        f"{arguments.file}: {written.num_documents:,} documents,"
        f" {written.text_bytes:,} bytes of text, as {file_type}"
    )
    keys = {"grain_train_files": arguments.file, "grain_file_type": file_type}
    if file_type != "parquet":
        keys["grain_record_format"] = "bytes"
    print("to train on it:", *(f"{key}={value}" for key, value in keys.items()))
    if written.skipped:
        print(
            f"skipped {len(written.skipped):,} files that are empty or not UTF-8 text,"
            f" such as {written.skipped[0]}"
        )
    return 0
