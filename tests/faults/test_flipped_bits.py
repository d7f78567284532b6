"""One bit of any file of any tier flips, or the file goes bad in another way.

A restore returns the saved values, or raises. A bad copy is written anew if another
holder has a good one; otherwise an error names the lost part, or an older step is
restored and the reason reported.
"""

import dataclasses
import functools
import os
import pathlib
import random
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.core import errors, topology
from elastic_ckpt.steps import layout
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.peers import agent, known_agents
from tests.faults import spoilt_files
from tests.processes import machines, tier_worlds

STEPS = (1, 2)
MACHINES = range(4)
EMPTY = 4
LEAF = r"state/(?:w|b|m|scale)\[[0-9:, ]*\]"
NAMED = re.compile(rf"{LEAF}|data/shard-[0-9]{{2}}|parts of data")
KEEP = ocp.training.preservation_policies.LatestN(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Machines whose RAM is there, the restoring one first, and whether storage is."""

    machines: tuple[int, ...]
    storage: bool


class Saved:
    """Two steps of a state in all tiers, which are restored again and again."""

    def __init__(self, ram, storage):
        self.ram = ram
        self.storage = str(storage)
        self.roots = {n: ram.directory(n) for n in (*MACHINES, EMPTY)}
        self.roots["storage"] = self.storage
        self.kept = {
            holder: spoilt_files.contents(self._below(holder)) for holder in self.roots
        }

    def files(self, place):
        """All that can go bad there, of the newer step."""
        files = []
        for holder in (*place.machines, *(["storage"] if place.storage else [])):
            for path, content in self.kept[holder].items():
                if content and step_of(path) == STEPS[-1]:
                    files.append((holder, path))
        return files

    def path(self, holder, file):
        return os.path.join(self._below(holder), file)

    def older(self, holder, file, chance):
        """The content of such a file of the older step."""
        kept = self.kept[holder]
        path = re.sub(r"^((?:[0-9]+/)?)2(?=[-/])", r"\g<1>1", file)
        if path in kept:
            return kept[path]
        # Files of values have other names in each step.
        kind = os.path.basename(os.path.dirname(file))
        alike = [each for each in kept if step_of(each) == STEPS[0] and kind in each]
        return kept[chance.choice(alike)]

    def restore(self, place, step=None):
        """Restores in a new world of one host, checks every bit; returns the events."""
        own = self.roots[place.machines[0] if place.machines else EMPTY]
        known_agents.write(own, {})
        events = []
        tiers = [
            choices.Local(own, keep=KEEP),
            choices.Peers(
                known=tuple(agent.find(self.roots[n]).url for n in place.machines[1:])
            ),
        ]
        if place.storage:
            tiers.append(choices.Persistent(self.storage, every=1))
        with frontend.Checkpointer(
            tiers,
            run="run",
            slice_name="0",
            emit=lambda name, **fields: events.append({"event": name, **fields}),
        ) as checkpointer:
            counter = tier_worlds.Counter()
            loaded = checkpointer.load_checkpointables(
                step, {"state": wanted(), "data": counter}
            )
            restored = checkpointer.latest.step
        tier_worlds.check(loaded["state"], restored)
        assert counter.step == restored
        assert step in (None, restored)
        return restored, events

    def put_back(self):
        """Makes all files what they were; those that differed, as (of, path)."""
        different = []
        for holder, kept in self.kept.items():
            now = spoilt_files.contents(self._below(holder))
            if now != kept:
                different += [
                    (holder, path)
                    for path in {**now, **kept}
                    if now.get(path) != kept.get(path)
                ]
                spoilt_files.put_back(self._below(holder), kept)
        return different

    def _below(self, holder):
        root = self.roots[holder]
        return root if holder == "storage" else os.path.join(root, "hosts")


def step_of(path):
    """The step that a file is of: in RAM below its slot, in storage at the top."""
    match = re.match(r"(?:[0-9]+/(?=[0-9]+-))?([0-9]+)[-/]", path)
    return int(match[1]) if match else None


def kind_of(path):
    """The purpose of a file."""
    for sign, kind in {
        "manifest.ocdbt": "manifest of a store",
        "ocdbt": "values in a store",
        "manifest-": "manifest",
        "/data/": "component",
        "zarr.json": "metadata of an array",
        "/state/.*/c": "chunk",
    }.items():
        if re.search(sign, path):
            return kind
    return "metadata of Orbax"


def wanted():
    devices = np.array(jax.devices()[:2]).reshape(1, 2)
    return tier_worlds.abstract(Mesh(devices, topology.BATCH_AXES), True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    storage = tmp_path_factory.mktemp("storage") / "steps"
    with machines.Machines() as ram:
        ram.start_agents((*MACHINES, EMPTY))
        tier_worlds.run(
            functools.partial(tier_worlds.save, steps=STEPS, sharded=True),
            num_hosts=len(MACHINES),
            directories=[ram.directory(number) for number in MACHINES],
            logs=logs,
            slices=2,
            persistent=str(storage),
            keep=KEEP,
        )
        os.makedirs(os.path.join(ram.directory(EMPTY), "hosts"), exist_ok=True)
        yield Saved(ram, storage)


# By name, of how many machines the RAM is there, and whether storage is. Any two
# machines together have all of a step, of which each machine has three quarters.
PLACES = {
    "ram": (4, False),
    "half of the ram": (2, False),
    "half of the ram, and storage": (2, True),
    "storage": (0, True),
}
# Tiers in which some parts have one holder.
AT_RISK = ("half of the ram", "storage")


def place_of(place_name, chance):
    num_machines, storage = PLACES[place_name]
    return Place(machines=tuple(chance.sample(MACHINES, num_machines)), storage=storage)


@pytest.mark.slow
def test_without_a_fault_the_newer_step_is_restored_anywhere(saved):
    for place_name in PLACES:
        step, events = saved.restore(place_of(place_name, random.Random(0)))
        assert step == STEPS[-1]
        (event,) = events
        assert (event["event"], event["bad_copies"]) == ("restored_from", 0)
        assert not saved.put_back()


def check_spoilt(saved, place_name, kind, chance):
    """Spoils a file, restores, and puts it back; what came of it, in a word."""
    place = place_of(place_name, chance)
    # Each kind has the same chance, because some have many more files.
    by_kind = {}
    for holder, file in saved.files(place):
        by_kind.setdefault(kind_of(file), []).append((holder, file))
    if place.machines and chance.random() < 0.5:
        # Files of the restoring host itself are repaired if another host has them.
        own = place.machines[0]
        by_kind = {
            part: [each for each in by_kind[part] if each[0] == own]
            for part in ("chunk", "component")
        }
    holder, file = chance.choice(by_kind[chance.choice(sorted(by_kind))])
    context = f"{place_name}: {file} of {holder} {kind}"
    other = saved.older(holder, file, chance)
    at = spoilt_files.spoil(saved.path(holder, file), kind, chance, other=other)
    step = chance.choice([None, STEPS[-1]])
    problem, restored, events = None, None, []
    try:
        restored, events = saved.restore(place, step)
    except errors.CheckpointError as error:
        problem = str(error)
    different = saved.put_back()
    # No other file is touched, but what a bad manifest named.
    assert "manifest-" in file or set(different) <= {(holder, file)}, context
    if restored == STEPS[-1]:
        if holder in place.machines[:1] and is_read(file, at, saved.kept[holder]):
            assert not different, f"{context}: it was not put right"
            return "repaired"
        return "not needed"
    assert place_name in AT_RISK, f"{context}: {problem}"
    if kind_of(file) in ("chunk", "component"):
        # Nobody else has it.
        assert not any(file in saved.kept[n] for n in {*place.machines} - {holder}), (
            context
        )
    if problem is not None:
        assert step == STEPS[-1], f"{context}: {problem}"
        assert NAMED.search(problem), f"{context}: {problem}"
        return "error"
    reasons = [each["why"] for each in events if each["event"] == "step_passed_over"]
    assert any(NAMED.search(why) for why in reasons), f"{context}: {reasons}"
    return "older step"


def is_read(file, at, kept):
    """Whether a file of RAM has a part of the step at a place."""
    if "/state/" not in file:
        return "/data/" in file
    return "/c" in file and at < len(kept[file]) - layout.CHECKSUM_BYTES


def run(saved, num, kind, seed):
    """Spoils files one after the other, everywhere in turn."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    outcomes = {}
    for number in range(num):
        place_name = list(PLACES)[number % len(PLACES)]
        outcome = (place_name, check_spoilt(saved, place_name, kind, chance))
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(outcomes)
    # Otherwise this could pass without one repair. About 20 of 60 were found, and 8 in
    # each place where every part has two holders.
    repaired = {
        place_name: outcomes.get((place_name, "repaired"), 0) for place_name in PLACES
    }
    assert sum(repaired.values()) >= num / 8, repaired
    assert min(repaired["ram"], repaired["half of the ram, and storage"]) >= num / 30


@pytest.mark.slow
def test_a_flipped_bit_is_never_handed_out(saved):
    run(saved, 60, "flipped", seed=1)


def test_if_no_step_is_left_the_error_says_what_each_lacks(saved):
    for step in STEPS:
        os.unlink(saved.path("storage", f"{step}/data/shard-05"))
    with pytest.raises(errors.CheckpointError) as raised:
        saved.restore(Place(machines=(), storage=True))
    for step in STEPS:
        assert f"step {step}: no good copy of data/shard-05 is left" in str(
            raised.value
        )
    assert len(saved.put_back()) == len(STEPS)


def test_storage_out_of_reach_is_told_and_what_is_in_ram_is_restored(saved):
    away = f"{saved.storage}-away"
    os.rename(saved.storage, away)
    pathlib.Path(saved.storage).write_text("not a directory")
    try:
        step, events = saved.restore(Place(machines=(0, 1), storage=True))
        assert step == STEPS[-1]
        reasons = [each["why"] for each in events if each["event"] == "degraded"]
        unlisted = f"the steps in {saved.storage} cannot be listed"
        assert any(why.startswith(unlisted) for why in reasons)
        for why in reasons:
            assert why.startswith((unlisted, "leftovers were not removed: host 0:"))
        with pytest.raises(errors.CheckpointError, match="no step is complete in RAM"):
            saved.restore(Place(machines=(), storage=True))
    finally:
        os.unlink(saved.storage)
        os.rename(away, saved.storage)


@pytest.mark.slow
def test_a_world_puts_right_what_each_of_its_hosts_finds_spoilt(saved, tmp_path):
    chance = random.Random(4)
    for number in MACHINES:
        (file,) = (
            each
            for each in saved.kept[number]
            # A host's own chunk is the one that it needs.
            if each.endswith(f"state/b/c/{number}") and step_of(each) == STEPS[-1]
        )
        spoilt_files.spoil(saved.path(number, file), "scrambled", chance, other=b"")
    events = tier_worlds.run(
        functools.partial(tier_worlds.restore, step=STEPS[-1], sharded=True),
        num_hosts=len(MACHINES),
        directories=[saved.roots[number] for number in MACHINES],
        logs=tmp_path,
        slices=2,
        keep=KEEP,
    )
    assert not saved.put_back()
    (event,) = (each for each in events if each["event"] == "restored_from")
    assert (event["bad_copies"], event["repaired"]) == (4, 4)


@pytest.mark.night
def test_of_500_flipped_bits_none_is_handed_out(saved):
    run(saved, 500, "flipped", seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", spoilt_files.KINDS[1:])
def test_a_file_that_went_bad_is_never_handed_out(saved, kind):
    run(saved, 60, kind, seed=3)
