"""Draws a run that loses a slice: its loss, and which slices train, over time.

uv run --group docs python docs/picture.py RUN docs/pages/lost_slice.svg
"""

from __future__ import annotations

import json
import pathlib
import sys

import matplotlib.pyplot as plt

COLOUR = "#2a6f97"
LOST = "#c1121f"


def main(run: str, picture: str) -> None:
    """Draws the run with this directory."""
    directory = pathlib.Path(run)
    events = _lines(directory / "events.jsonl")
    start = next(e["time"] for e in events if e["event"] == "run_started")
    losses = [
        (line["time"] - start, line["last"])
        for line in _lines(directory / "metrics/run.jsonl")
        if line["metric"].endswith("train/loss")
    ]
    end = losses[-1][0]

    figure, (above, below) = plt.subplots(
        2, figsize=(8, 3.6), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    above.plot(*zip(*losses, strict=True), ".", markersize=3, color=COLOUR)
    above.set_ylabel("loss")
    for begin, until, slices in _worlds(events, start, end):
        below.barh(slices, until - begin, left=begin, height=0.6, color=COLOUR)
    below.set_yticks(range(4), [f"slice {number}" for number in range(4)])
    below.invert_yaxis()
    below.set_xlabel("seconds")
    below.set_xlim(0, end)
    for event in events:
        if event["event"] == "fault_injected":
            at, target = event["time"] - start, event["target"]
            text = "killed" if event["kind"] == "kill_slice" else "back"
            below.plot(at, target, "x" if text == "killed" else "^", color=LOST)
            below.annotate(
                f" {text}", (at, target), color=LOST, va="center", fontsize=9
            )
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})


def _worlds(
    events: list[dict], start: float, end: float
) -> list[tuple[float, float, list[int]]]:
    # When each world trained its first and its last step, and on which slices.
    worlds = []
    for event in events:
        at = event["time"] - start
        if event["event"] == "world_started":
            worlds.append([None, end, event["slices"]])
        elif event["event"] in ("compiled", "recovered") and worlds[-1][0] is None:
            worlds[-1][0] = at
        elif event["event"] in ("host_lost", "world_left"):
            worlds[-1][1] = at
    return [(begin, until, slices) for begin, until, slices in worlds]


def _lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main(*sys.argv[1:])
