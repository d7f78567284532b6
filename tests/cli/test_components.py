"""`elastic-ckpt components` shows the parts of a step."""

import json

import elastic_ckpt as ec
from elastic_ckpt.core import checked_json
from tests import runs
from tests.tiers import tiered_steps


class Described(tiered_steps.Cursors):
    """A component with a description of its pattern."""

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            fields = {"pattern": "per_group", "axes": ["data"], "hosts": 1}
            content = checked_json.to_bytes(fields, version=1)
            (path / "component.json").write_bytes(content)

        return write()


def dealt(old_states, new_count):
    return [old_states[number % len(old_states)] for number in range(new_count)]


def test_it_shows_patterns_files_sizes_and_digests(tmp_path):
    ram, steps = tmp_path / "ram", tmp_path / "steps"
    with tiered_steps.checkpointer(ram, steps) as checkpointer:
        for step in (1, 2):
            parts = {
                "state": tiered_steps.state(7),
                "data": tiered_steps.Cursors(),
                "rng": Described(),
                "counts": ec.components.Component(
                    [1], "per_host", on_resize=dealt, required=False
                ),
                "schedule": ec.components.Component([2], "global", on_resize="reset"),
            }
            assert checkpointer.save_checkpointables(step, parts)
            checkpointer.wait()
    shown = json.loads(runs.verb("components", "--json", steps))
    assert shown["step"] == 2
    parts = {each["name"]: each for each in shown["components"]}
    assert list(parts) == ["counts", "data", "rng", "schedule", "state"]
    (host,) = parts["counts"]["hosts"]
    declared = {
        name: (each["resize"], each["required"]) for name, each in parts.items()
    }
    assert declared == {
        "counts": (f"{__name__}.dealt", False),
        "data": ("its own rule", None),
        # From before it was written down.
        "rng": ("by the rule of the program that loads it", None),
        "schedule": ("none needed", True),
        "state": ("none needed", None),
    }
    assert (parts["rng"]["pattern"], parts["rng"]["version"]) == ("per_group data", 1)
    assert parts["data"]["num_files"] == 2
    assert parts["state"]["num_leaves"] == 4
    assert parts["state"]["num_bytes"] == 16 * 6 * 4 + 6 * 2 + 8
    # The same in RAM, and in the step before, as the values are the same.
    before = json.loads(runs.verb("components", "--json", ram, steps, "--step", 1))
    digests = {each["name"]: each["digest"] for each in before["components"]}
    assert digests["data"] == parts["data"]["digest"]
    text = runs.verb("components", steps)
    assert "  rng       per_group data, version 1, 1 files," in text
    assert f"  state     by sharding, 4 leaves, 404 bytes at 1 ({host})" in text
    (line,) = (line for line in text.splitlines() if line.startswith("  counts"))
    assert line.startswith("  counts    per_host, optional, version 1, 2 files,")
    assert line.endswith(f"resize: {__name__}.dealt")
    assert "no step 5 is complete" in runs.verb(
        "components", steps, "--step", 5, code=1
    )
    assert "there are no steps" in runs.verb("components", tmp_path, code=1)
    # `inspect` has them, too.
    assert "  data      its own files, 2 files," in runs.verb("inspect", steps)
