"""What the states of Grain's packers cost, as released and with the patch, in one run.

    uv run --group dev python docs/upstream/measure_packing_state.py

Packs documents that are interleaved from files, as a training run does.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

import applied

LENGTH = 2048
NUM_BINS = 64


def packed(num_files: int, num_documents: int) -> Iterable[dict]:
    """Documents of 50 to 500 tokens, interleaved from so many files."""
    import numpy as np
    from grain import python as pygrain
    from grain.experimental import (
        FirstFitPackIterDataset,
        InterleaveIterDataset,
    )

    def document(number: int) -> dict:
        rng = np.random.default_rng(number)
        return {"tokens": np.full(rng.integers(50, 500), number, np.int32)}

    per_file = num_documents // num_files
    files = [
        pygrain.MapDataset.range(n * per_file, (n + 1) * per_file).map(document)
        for n in range(num_files)
    ]
    dataset = InterleaveIterDataset(
        [file.to_iter_dataset() for file in files], cycle_length=num_files
    )
    return FirstFitPackIterDataset(
        dataset, length_struct={"tokens": LENGTH}, num_packing_bins=NUM_BINS
    )


def time_rows(num_files: int, num_documents: int) -> float:
    """The tokens per second of one pass."""
    began, tokens = time.perf_counter(), 0
    for row in packed(num_files, num_documents):
        tokens += int((row["tokens_segment_ids"] > 0).sum())
    return tokens / (time.perf_counter() - began)


def main() -> None:
    """Measures both in turn, each in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(time_rows(arguments.files, arguments.documents))
        return
    rates: dict[str, list[float]] = {"released": [], "patched": []}
    with tempfile.TemporaryDirectory() as directory:
        environment = applied.patched(
            pathlib.Path(directory), "grain", "grain-packing-state.patch"
        )
        for _ in range(arguments.rounds):
            for name, environ in (("released", None), ("patched", environment)):
                ran = subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], "--once"],
                    env=environ,
                    check=True,
                    capture_output=True,
                    text=True,
                )
                rates[name].append(float(ran.stdout))
    medians = {name: round(statistics.median(each)) for name, each in rates.items()}
    print(json.dumps({"tokens_per_sec": medians}))


if __name__ == "__main__":
    main()
