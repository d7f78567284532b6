"""What checksums of values find and cost, with and without them, in one run.

    uv run --group dev python docs/upstream/measure_checksums.py

Runs itself on a copy of the installed Orbax to which the patch is applied.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import applied


def find_flips(directory: pathlib.Path, num_flips: int, *, checks: bool) -> dict:
    """Saves random values, and loads them with one bit changed, again and again."""
    import jax.numpy as jnp
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    values = np.random.default_rng(0).standard_normal(2**16, np.float32)
    context = ocp.Context()
    if checks:
        context.array.saving.use_checksums = True
    step = directory / f"flips-{checks}"
    with context:
        ocp.save(step, {"w": jnp.asarray(values)})
    (file,) = [f for f in step.rglob("d/*") if f.stat().st_size > values.nbytes // 2]
    right = file.read_bytes()
    found = {"errors": 0, "wrong": 0, "right": 0}
    for place in np.linspace(64, len(right) - 4096, num_flips, dtype=int):
        wrong = bytearray(right)
        wrong[place] ^= 1 << int(place) % 8
        file.write_bytes(wrong)
        try:
            loaded = np.asarray(ocp.load(step)["w"])
        except Exception:
            found["errors"] += 1
        else:
            found["right" if np.array_equal(loaded, values) else "wrong"] += 1
    return found


def time_both(directory: pathlib.Path, mebibytes: int, rounds: int) -> dict:
    """The medians of saves and loads, in turn without and with checksums."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    values = np.random.default_rng(0).standard_normal(mebibytes * 2**18, np.float32)
    tree = {"w": jax.block_until_ready(jnp.asarray(values))}
    secs: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for checks in (False, True):
            context = ocp.Context()
            context.array.saving.use_checksums = checks
            step = directory / f"{number}-{checks}"
            name = "with" if checks else "without"
            began = time.perf_counter()
            with context:
                ocp.save(step, tree)
            saved = time.perf_counter()
            jax.block_until_ready(ocp.load(step))
            loaded = time.perf_counter()
            shutil.rmtree(step)
            if number:
                # The first round compiles.
                secs.setdefault(f"save_secs_{name}", []).append(saved - began)
                secs.setdefault(f"load_secs_{name}", []).append(loaded - saved)
    return {name: round(statistics.median(each), 3) for name, each in secs.items()}


def main() -> None:
    """Measures the release here, and the patched Orbax in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--is-patched", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        if arguments.is_patched:
            flips = find_flips(place, arguments.flips, checks=True)
            measured = time_both(place, arguments.mebibytes, arguments.rounds)
            print(json.dumps({"with_checksums": flips, **measured}))
            return
        print(
            json.dumps(
                {"as_released": find_flips(place, arguments.flips, checks=False)}
            )
        )
        words = [sys.executable, __file__, *sys.argv[1:], "--is-patched"]
        environment = applied.patched(
            place, "orbax.checkpoint", "orbax-checksums.patch"
        )
        subprocess.run(words, env=environment, check=True)


if __name__ == "__main__":
    main()
