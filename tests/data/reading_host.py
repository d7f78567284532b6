"""A host that reads with two workers until it is killed; prints their numbers."""

import os
import pathlib
import sys

from tests import formats, process_tree, worlds


def main(directory: pathlib.Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(directory)
    parts = formats.write(directory, "parquet")
    world = worlds.World(formats.data(parts, "plain", num_workers=2), 1, 12)
    world.batch()
    _, *workers = process_tree.of(os.getpid())
    print(*workers, flush=True)
    while True:
        world.batch()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
