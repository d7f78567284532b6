"""Any file of a step goes bad in any way: no reader returns what was not saved.

A restore returns the saved values or an error that names the lost part, or takes the
older step and says why. What another holder has good is written anew. A verification
finds every bad copy, and a follower gets good values or none.
"""

import os
import random
import re
import shutil

import pytest

from elastic_ckpt.checkpoint import follow
from elastic_ckpt.core import errors
from elastic_ckpt.inspect import tier_locations, verification
from elastic_ckpt.steps import layout
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from elastic_ckpt.tiers.ram import ram_disk
from tests import shared_memory, spoilt_files
from tests.model import simulated_world
from tests.model.checked_run import CheckedRun

STORAGE = "storage"
# Kinds of files, by a pattern of their paths.
FILES = {
    "manifest of a store": r"manifest\.ocdbt$",
    "values in a store": r"ocdbt\.process_.*/d/|/state/d/",
    "manifest": r"/manifest-[^/]*$",
    "component": r"/data/position$",
    "array": r"zarr\.json$",
    "chunk": r"/state/\w+/c/",
    "Orbax's": r"",
}
# Kinds of which a verification finds each change, as its readers read all of it.
VERIFIED = ("manifest", "component", "chunk")
# The machines of the world that restores, those that have their RAM, and whether there
# is storage. Each machine has a copy of everything.
PLACES = {
    "all tiers": ((0, 1), (0, 1), True),
    "both machines": ((0, 1), (0, 1), False),
    "a new machine": ((2, 0), (0,), True),
    "one machine": ((0,), (0,), False),
    "storage": ((2,), (), True),
}
# Where a part has one holder.
AT_RISK = ("one machine", "storage")
NAMED = re.compile(r"state/[bvw]\[[0-9:, ]*\]|data/position|not in any")


class Saved:
    """Two steps in the RAM of two machines and in storage."""

    def __init__(self, run):
        run.open((0, 1))
        for step in (1, 2):
            run.save(step)
            run.wait()
        run.close()
        sim = self.sim = run.sim
        self.roots = {**dict(enumerate(sim.roots)), STORAGE: sim.storage}
        self.kept = {of: spoilt_files.contents(self.roots[of]) for of in self.roots}
        self.values = {save.step: save.values for save in run.model.saves.values()}
        # The files of the newer step, by kind.
        self.files = {kind: [] for kind in FILES}
        for holder, contents in self.kept.items():
            for path, content in contents.items():
                if content and re.match(r"(hosts/\d/2-|2/)", path):
                    self.files[kind_of(path)].append((holder, path))

    def spoil(self, holder, file, kind, chance):
        """Spoils a file; returns where it differs first."""
        older = re.sub(r"^(hosts/\d/)?2(-\d+)?/", "", file)
        swapped = [
            content
            for path, content in self.kept[holder].items()
            if re.match(r"(hosts/\d/1-|1/)", path)
            and (path.endswith(older) or kind_of(path) == kind_of(file))
        ]
        path = os.path.join(self.roots[holder], file)
        return spoilt_files.spoil(path, kind, chance, other=chance.choice(swapped))

    def restore(self, place, step):
        """Restores in a world, compares every bit; returns the step."""
        machines, there, has_storage = PLACES[place]
        for number in {0, 1}.difference(there):
            self.sim.roots[number].rename(self.away(number))
        for number in {0, 1, 2}.difference(there):
            self.sim.evict(number)
        world = self.sim.open(machines, store_every=1 if has_storage else None)
        position = simulated_world.Position()
        wanted = {"state": simulated_world.abstract(), "data": position}
        state = world.load_checkpointables(step, wanted)["state"]
        restored = self.sim.hosts.opened_id.step
        read = {name: leaf.tobytes() for name, leaf in state.items()}
        assert (read, position.value) == self.values[restored]
        return restored

    def away(self, number):
        """Where the RAM of a machine is that is not there."""
        return self.sim.roots[number].parent / "away"

    def verified(self):
        """The problems that a verification of all tiers finds."""
        tiers = [
            ram_disk.RamDisk(self.roots[n], run=simulated_world.RUN) for n in (0, 1)
        ]
        root = persistent_root.PersistentRoot.from_path(self.roots[STORAGE])
        tiers.append(persistent_tier.PersistentTier(root, run=simulated_world.RUN))
        locations = tier_locations.Locations(tiers)
        read = verification.verify(locations, [2], progress=lambda *_: None)
        return read.problems

    def followed(self):
        """Reads what a follower of the steps in storage reads, and compares it."""
        for step in follow.watch_steps(self.roots[STORAGE], timeout_secs=0):
            try:
                state = step.load(simulated_world.abstract())
            except errors.CheckpointError:
                continue
            read = {name: leaf.tobytes() for name, leaf in state.items()}
            assert read == self.values[step.step][0]

    def put_back(self):
        """Makes all files what they were."""
        self.sim.end()
        for number in (0, 1):
            if self.away(number).exists():
                shutil.rmtree(self.sim.roots[number])
                self.away(number).rename(self.sim.roots[number])
        for holder, kept in self.kept.items():
            spoilt_files.put_back(self.roots[holder], kept)


def kind_of(path):
    return next(kind for kind, pattern in FILES.items() if re.search(pattern, path))


@pytest.fixture(scope="module")
def saved():
    keep = simulated_world.latest(2)
    with (
        shared_memory.directory("spoilt") as directory,
        CheckedRun(directory, num_machines=3, store_every=1, keep_local=keep) as run,
    ):
        yield Saved(run)


def check(saved, damage, holder, file, place, step, chance):
    """Spoils a file, and has all readers read; what a restore came to, in a word."""
    kind, context = kind_of(file), f"{place}, step {step}: {file} of {holder} {damage}"
    at = saved.spoil(holder, file, damage, chance)
    saved.followed()
    is_other = spoilt_files.contents(saved.roots[holder]) != saved.kept[holder]
    # Without its manifest a holder has nothing, as if it had never saved the step.
    if is_other and kind in VERIFIED and (kind, damage) != ("manifest", "removed"):
        assert saved.verified(), context
    problem = restored = None
    try:
        restored = saved.restore(place, step)
    except errors.CheckpointError as error:
        problem = str(error)
    assert not saved.sim.bugs, context
    events = list(saved.sim.events)
    now = spoilt_files.contents(saved.roots[holder]).get(file)
    saved.put_back()
    if restored == 2:
        if holder in PLACES[place][0] and is_read(file, at, holder, saved.kept[holder]):
            assert now == saved.kept[holder][file], f"{context}: it was not put right"
            return "repaired"
        return "not needed"
    assert place in AT_RISK, f"{context}: {problem}"
    if problem is not None:
        assert NAMED.search(problem), f"{context}: {problem}"
        return "error"
    assert step is None, context
    if kind == "manifest":
        # Of the only machine: it is as if it had not committed the step.
        return "older step"
    reasons = [each["why"] for name, each in events if name == "step_passed_over"]
    assert any(NAMED.search(why) for why in reasons), f"{context}: {reasons}"
    return "older step"


def is_read(file, at, machine, kept):
    """Whether the host of a machine reads these bytes of its own copy."""
    own = rf"/state/(b/c/0|v/c/0/0|w/c/{machine})$"
    return re.search(own, file) and at < len(kept[file]) - layout.CHECKSUM_BYTES


def examples(saved, chance, num):
    """Files of each kind, each in a place where it is."""
    for files in saved.files.values():
        for _ in range(num):
            holder, file = chance.choice(files)
            places = [
                name
                for name, (_, there, has_storage) in PLACES.items()
                if (has_storage if holder == STORAGE else holder in there)
            ]
            yield holder, file, chance.choice(places), chance.choice([None, 2])


@pytest.mark.parametrize("num", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_returned(saved, num):
    chance = random.Random(num)
    for damage in spoilt_files.KINDS:
        for example in examples(saved, chance, num):
            check(saved, damage, *example, chance)


@pytest.mark.parametrize("damage", ["removed", "emptied", "swapped"])
def test_a_bad_copy_is_put_right_and_a_lost_part_costs_its_step(saved, damage):
    chance = random.Random(0)
    (chunk,) = (
        path for of, path in saved.files["chunk"] if of == 0 and path.endswith("b/c/0")
    )
    assert check(saved, damage, 0, chunk, "both machines", 2, chance) == "repaired"
    for step, outcome in ((2, "error"), (None, "older step")):
        part = (STORAGE, "2/data/position", "storage", step)
        assert check(saved, damage, *part, chance) == outcome


def test_if_no_step_is_left_the_error_says_what_each_lacks(saved):
    for step in (1, 2):
        (saved.sim.storage / f"{step}/data/position").unlink()
    with pytest.raises(errors.CheckpointError) as raised:
        saved.restore("storage", None)
    for step in (1, 2):
        lacking = f"step {step}: no good copy of data/position is left"
        assert lacking in str(raised.value)
    saved.put_back()


def test_storage_out_of_reach_is_told_and_what_is_in_ram_is_restored(saved):
    away = saved.sim.storage.rename(saved.sim.storage.with_name("away"))
    saved.sim.storage.write_text("not a directory")
    try:
        assert saved.restore("all tiers", None) == 2
        told = [each["why"] for name, each in saved.sim.events if name == "degraded"]
        unlisted = f"{saved.sim.storage} cannot be read or listed"
        assert any(why.startswith(unlisted) for why in told), told
        lacking = f"step 7 is not complete in RAM, and {unlisted}"
        with pytest.raises(errors.CheckpointError, match=lacking):
            saved.sim.world.load(7)
        saved.sim.end()
        with pytest.raises(errors.CheckpointError, match="no step is complete in RAM"):
            saved.restore("storage", None)
    finally:
        saved.sim.storage.unlink()
        away.rename(saved.sim.storage)
        saved.put_back()


def test_without_damage_every_reader_finds_the_newer_step(saved):
    for place in PLACES:
        assert saved.restore(place, None) == 2
        saved.put_back()
    saved.followed()
    assert not saved.verified()


def test_a_commit_file_of_which_any_bit_is_another_names_one_save_or_none(tmp_path):
    content = persistent_root.commit_text(tmp_path, "run", "save")
    found = set()
    for number in range(8 * len(content)):
        altered = bytearray(content)
        altered[number // 8] ^= 1 << number % 8
        (tmp_path / persistent_root.COMMIT_FILE).write_bytes(altered)
        found.add(persistent_root.committed(tmp_path))
    assert {("", ""), ("run", "save")} < found
    assert all(run and save for run, save in found - {("", "")})
