"""Draws a run that loses a slice: its loss, and which slices train, over time.

uv run --group docs python docs/picture.py RUN docs/pages/lost_slice.svg
"""

from __future__ import annotations

import json
import pathlib
import sys

from elastic_ckpt.inspect import page

_WIDTH = 760


def main(run: str, picture: str) -> None:
    """Draws the run with this directory."""
    directory = pathlib.Path(run)
    events = _lines(directory / "events.jsonl")
    start = next(e["time"] for e in events if e["event"] == "run_started")
    losses = [
        {"secs": line["time"] - start, "loss": line["last"]}
        for line in _lines(directory / "metrics/run.jsonl")
        if line["metric"].endswith("train/loss")
    ]
    end = losses[-1]["secs"]
    faults = [
        {
            "secs": event["time"] - start,
            "slice": f"slice {event['target']}",
            "text": "killed" if event["kind"] == "kill_slice" else "back",
        }
        for event in events
        if event["event"] == "fault_injected"
    ]
    secs = {
        **{"field": "secs", "type": "quantitative", "title": "seconds"},
        "scale": {"domain": [0, end], "nice": False},
    }
    slices = {"field": "slice", "type": "nominal", "title": None}
    loss = {
        "height": 170,
        "data": {"values": losses},
        "mark": {"type": "point", "filled": True, "size": 14, "color": page.COLORS[0]},
        "encoding": {
            "x": {**secs, "title": None, "axis": {"labels": False}},
            "y": {
                **{"field": "loss", "type": "quantitative"},
                "scale": {"zero": False},
            },
        },
    }
    trained = {
        "height": 90,
        "layer": [
            {
                "data": {"values": _worlds(events, start, end)},
                "mark": {"type": "bar", "height": 13, "color": page.COLORS[0]},
                "encoding": {
                    "x": secs,
                    "x2": {"field": "until"},
                    "y": slices,
                },
            },
            {
                "data": {"values": faults},
                "mark": {
                    **{"type": "text", "color": page.LOST, "align": "left"},
                    **{"dx": 6, "fontWeight": "bold"},
                },
                "encoding": {"x": secs, "y": slices, "text": {"field": "text"}},
            },
        ],
    }
    both = {"vconcat": [{"width": _WIDTH, **each} for each in (loss, trained)]}
    drawn = page.svg(both, title="The loss and the slices of a run", width=None)
    pathlib.Path(picture).write_text(drawn + "\n")


def _worlds(events: list[dict], start: float, end: float) -> list[dict]:
    # From the first to the last step of each world, each of its slices.
    worlds = []
    for event in events:
        at = event["time"] - start
        if event["event"] == "world_started":
            worlds.append({"secs": None, "until": end, "slices": event["slices"]})
        elif event["event"] in ("compiled", "recovered") and not worlds[-1]["secs"]:
            worlds[-1]["secs"] = at
        elif event["event"] in ("host_lost", "world_left"):
            worlds[-1]["until"] = at
    return [
        {**world, "slice": f"slice {number}"}
        for world in worlds
        for number in world["slices"]
    ]


def _lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main(*sys.argv[1:])
