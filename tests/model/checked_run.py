"""A run in a simulation beside its model: each act is done to both, and compared.

An act in which hosts end (a crash, a message that is lost) ends the world; the next act
is then `open`.
"""

from __future__ import annotations

import contextlib
import pathlib
import random

import pytest

from elastic_ckpt.checkpoint import follow
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps import layout
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import leases, persistent_root
from elastic_ckpt.tiers.ram import ram_disk
from tests import spoilt_files
from tests.model import simulated_world
from tests.model.model import Model
from tests.model.simulated_world import Crash, Gone


class CheckedRun:
    """A run.

    Args:
      directory: in memory.
      num_machines: how many there are.
      stored_steps: how many steps storage keeps; None for all.
      in_place: whether storage is as a bucket is.
      claims: whether each world is one of another start, which claims the run.
      **tiers: see `Simulation.open`.
    """

    def __init__(
        self,
        directory,
        *,
        num_machines=4,
        stored_steps=None,
        in_place=False,
        claims=False,
        **tiers,
    ):
        self.sim = simulated_world.Simulation(
            pathlib.Path(directory),
            num_machines=num_machines,
            in_place=in_place,
            claims=claims,
        )
        self._claims = claims
        self.model = Model(stored_steps=stored_steps)
        self._tiers = tiers
        if stored_steps is not None:
            self._tiers["keep"] = simulated_world.latest(stored_steps)
        # The machines that each has heard of since it has its memory.
        self._heard = {n: {n} for n in range(num_machines)}
        self._seed = 0
        self._leases = {}
        # Those of which events are: events name steps alone.
        self._by_step = {}
        # Whether bits were flipped, or machines fail.
        self._is_spoilt = False
        self.machines = ()
        self.head = None
        self.is_behind = self.has_ended = False

    def __enter__(self):
        self.sim.__enter__()
        return self

    def __exit__(self, *error):
        for each in self._leases.values():
            with contextlib.suppress(errors.CheckpointError):
                each.close()
        self.sim.__exit__(*error)

    @property
    def is_open(self):
        """Whether there is a world."""
        return self.sim.world is not None

    @contextlib.contextmanager
    def _may_end(self):
        # Hosts may end in the block; then all of them do.
        has_ended, full_at = False, self.sim.files.full_at
        try:
            yield
        except (Crash, Gone):
            has_ended = True
        except (errors.ElasticCkptError, OSError):
            # Without room for something a world may not begin, or end well.
            if full_at is None or self.sim.files.full_at is not None:
                raise
            has_ended = True
        self._is_spoilt |= full_at is not None
        hosts = self.sim.hosts
        self._note_events()
        if has_ended or (hosts is not None and hosts.is_broken):
            self.end()
        assert not self.sim.bugs, self.sim.bugs[0]

    def end(self):
        """Ends all hosts at once."""
        self.has_ended = True
        self.sim.end()
        self.sim.files.full_at = None
        self.sim.threads.late = frozenset()
        self.sim.network.failing.clear()

    def close(self):
        """Closes the world, which first does all that it has begun."""
        with self._may_end():
            try:
                self.sim.world.close()
            except errors.NotStoredError as error:
                # It says so, and something has failed, or a step may not be replaced.
                is_kept = self._leases and "is leased" in str(error)
                assert self._is_spoilt or is_kept or self.sim.hosts.is_broken
            self._note_events()
            self.sim.hosts = self.sim.world = None

    def open(self, machines):
        """Begins a world on some machines, which restores the newest step."""
        self.machines, self.has_ended = tuple(machines), False
        out_of_reach = self._out_of_reach()
        self.head, self._by_step = None, {}
        # A restore without room for files of components takes an older step.
        self.sim.files.full_at = None
        with self._may_end():
            heard = set().union(*(self._heard[n] for n in machines), machines)
            world = self.sim.open(machines, **self._tiers)
            for n in machines:
                self._heard[n] = set(heard)
            latest = world.latest
            try:
                if latest is not None:
                    self._load(None, out_of_reach)
                    assert world.latest.step_id == self.sim.hosts.opened_id
                    return
            except errors.CheckpointError:
                if self.model.newest(out_of_reach) is not None:
                    raise
            assert self.model.newest(out_of_reach) is None
            world.start_over()

    def load(self, step, *, roll_back=False):
        """Loads a step by its number, which has to be sure."""
        with self._may_end():
            self.sim.world.wait()
            self._note_events()
            if roll_back:
                # Others count no more, or if it is cut short, perhaps still.
                (wanted,) = (each for each in self.sure_steps() if each.step == step)
                self._leave_others(wanted)
            self._load(step, frozenset(), roll_back=roll_back)

    def _leave_others(self, head):
        # Saves that are not of the line of one are not sure any more.
        line = set() if head is None else set(head.line())
        for each in set(self.model.saves.values()) - line:
            each.in_ram = each.stored = False

    def _load(self, step, out_of_reach, *, roll_back=False):
        position = simulated_world.Position()
        restored = self.sim.world.load_checkpointables(
            step,
            {"state": simulated_world.abstract(), "data": position},
            roll_back=roll_back,
        )
        step_id = self.sim.hosts.opened_id
        save = self.model.saves[step_id]
        read = {name: leaf.tobytes() for name, leaf in restored["state"].items()}
        assert (read, position.value) == save.values
        if step is None:
            assert self.model.may_be_restored(save, out_of_reach), (
                step_id,
                self.model.newest(out_of_reach),
            )
        # It stays until a newer one has its copies.
        save.is_covered = True
        # A run that does not go back may not save to an older step.
        self.is_behind = not (roll_back or step is None or save is self.head)
        head = self.head
        self._go_on_from(save)
        self._note_events()
        if self.is_behind:
            self._go_on_from(head)
            return
        if roll_back and save is not head:
            self.model.leave(save)

    def _go_on_from(self, save):
        self.head = save
        self._by_step = {each.step: each for each in reversed(list(save.line()))}

    def save(self, step, *, overwrite=False):
        """Saves a new state."""
        self._seed += 1
        state, data = simulated_world.state_of(self._seed), self._seed
        values = ({name: leaf.tobytes() for name, leaf in state.items()}, data)
        replaces = parent = self.head
        if overwrite and replaces is not None:
            parent = replaces.parent

        def begun(step_id):
            # What was said before is of the saves before.
            self._note_events()
            self._save = self.model.begin(
                step_id, values, parent, replaces=replaces if overwrite else None
            )
            self._by_step[step] = self._save

        self.sim.hosts.on_capture = begun
        self._save = None
        if self.is_behind:
            with self._may_end(), pytest.raises(errors.CheckpointError, match="later"):
                self.sim.world.save_checkpointables(step, {"state": state})
            return
        if self._claims:
            # Its world is claimed before anything is captured.
            self._leave_others(self.head)
        with self._may_end():
            response = self.sim.world.save_checkpointables_async(
                step,
                {"state": state, "data": simulated_world.Position(data)},
                overwrite=overwrite,
            )
            if response is not None:
                self.head = self._save

    def wait(self):
        """Waits for all that was begun."""
        with self._may_end():
            self.sim.world.wait()

    def catch_up(self):
        """Lets the threads that are late do their work."""
        with self._may_end():
            self.sim.threads.catch_up()

    def evict(self, machine):
        """Loses the memory of a machine; no host may be there."""
        self.sim.evict(machine)
        self.model.lose(machine)
        self._heard[machine] = {machine}

    def fail(self, machine):
        """Has the agent of a machine not answer as long as this world lasts."""
        self._is_spoilt = True
        self.sim.network.failing.add(machine)

    def pin(self, save):
        """Pins a step in storage."""
        with self.sim.files.by_others():
            preserved.pin(self.sim.storage / str(save.step))
        save.kept.add("pin")

    def lease(self, save):
        """Has another program lease a step in storage."""
        if save not in self._leases:
            self._leases[save] = lease = contextlib.ExitStack()
            save.kept.add("lease")
            with self.sim.files.by_others():
                lease.enter_context(leases.lease(self.sim.storage / str(save.step)))

    def end_leases(self):
        """Ends all leases: their steps were there all the time."""
        while self._leases:
            save, lease = self._leases.popitem()
            save.kept.discard("lease")
            with self.sim.files.by_others():
                # It raises an error if the step was removed, or saved again.
                try:
                    lease.close()
                except errors.CheckpointError:
                    assert save.is_spoilt or not save.stored

    def preempt(self, step, *, loses_memory):
        """Saves a last step; the copies and the backup are left to the next world."""
        self.sim.is_leaving_world, self.sim.loses_memory = True, loses_memory
        self.save(step)
        if self.is_open:
            self.close()

    def flip(self, machine, number):
        """Flips a bit of what a machine has in RAM; whether there was any."""
        return self.spoil(machine, number, "flipped")

    def spoil(self, machine, number, kind):
        """Spoils a part that a machine has in RAM; whether there was any."""
        disk = ram_disk.RamDisk(self.sim.roots[machine], run=simulated_world.RUN)
        files = []
        for slot, step_id in disk.all_saves():
            with contextlib.suppress(errors.CheckpointError):
                listed = disk.manifest(slot, step_id)
                directory = pathlib.Path(disk.step_directory(slot, step_id))
                files += [directory / name for name in named_files(listed)]
        if not self._spoil(files, number, kind):
            return False
        self.model.lose(machine)
        return True

    def spoil_stored(self, number, kind):
        """Spoils any file of a step in storage; whether there was any."""
        stored = [save for save in self.model.saves.values() if save.is_stored]
        if not stored:
            return False
        save = stored[number % len(stored)]
        directory = self.sim.storage / str(save.step)
        files = [each for each in sorted(directory.rglob("*")) if each.is_file()]
        save.is_spoilt = self._spoil(files, number, kind)
        return save.is_spoilt

    def _spoil(self, files, number, kind):
        files = [each for each in files if each.exists() and each.stat().st_size]
        if not files:
            return False
        chance = random.Random(number)
        path = files[number % len(files)]
        spoilt_files.spoil(path, kind, chance, other=chance.randbytes(20))
        self._is_spoilt = True
        return True

    def delete(self, save):
        """Removes a step that is not the newest from all tiers."""
        save.in_ram = save.stored = False
        with self._may_end():
            self.sim.world.delete(save.step, missing_ok=True)
            self._note_events()

    def evaluate(self, save):
        """Records a metric of a step that storage has."""
        self._seed += 1
        with self._may_end():
            self.sim.world.record_metrics(save.step, {"loss": self._seed})
            if "degraded" not in [name for name, _ in self.sim.events]:
                save.loss = self._seed
                self.check_evaluations()

    def check_evaluations(self):
        """Checks the metrics of the steps that storage has."""
        recorded = self.sim.world.evaluations()
        for save in self.sure_steps():
            loss = recorded.get(save.step, {}).get("loss")
            assert loss == save.loss, (save.step, recorded)

    def follow(self):
        """Another program reads all steps in storage, each as it was saved."""
        read = set()
        with self.sim.files.by_others():
            for step in follow.watch_steps(
                self.sim.storage, poll_secs=0, timeout_secs=0
            ):
                # Where the file that names its save went bad, one of those of the step.
                there = [
                    save
                    for step_id, save in self.model.saves.items()
                    if step_id == (step.step, step.save)
                    or (not step.save and step_id.step == step.step and save.is_spoilt)
                ]
                assert there
                try:
                    loaded = step.load(simulated_world.abstract())
                except errors.CheckpointError:
                    assert any(save.is_spoilt or not save.stored for save in there)
                    continue
                values = {name: leaf.tobytes() for name, leaf in loaded.items()}
                (save,) = (save for save in there if save.values[0] == values)
                read.add(save)
        # One that was being replaced may be set aside, or its successor is there, if
        # only in part; and a removal that was cut short is finished by the next one.
        numbers = {save.step for save in read}
        announced = list((self.sim.storage / leases.DIRECTORY).glob("*.removing"))
        root = persistent_root.PersistentRoot(
            path=storage.absolute(self.sim.storage), in_place=self.sim.in_place
        )
        for save in self.model.saves.values():
            is_there = root.is_committed(save.step)
            is_due = save.is_stored and is_there and not announced
            assert save.step in numbers or not is_due

    def be_replaced(self, machines, step):
        """Another start continues the run, while this one is alive and saves, too."""
        old, is_behind = (self.sim.world, self.sim.hosts), self.is_behind
        old[1].on_capture = lambda _: None
        self.sim.world = self.sim.hosts = None
        try:
            self.open(machines)
            if self.is_open:
                self.save(step if self.head is None else self.head.step + 1)
            if self.is_open:
                self.wait()
            # One that stores nothing any more is not told, and does no harm.
            is_told = self._tiers["store_every"] <= 3 and not is_behind
            if self.is_open and self.sure_steps() and is_told:
                # It has ended before if a message of it was lost.
                with pytest.raises((errors.ReplacedError, Gone, Crash)):
                    _save_more(old[0], step)
        finally:
            old[1].close()
            with contextlib.suppress(Crash):
                old[0].abandon()

    def check_nothing_is_left(self):
        """Checks that the hosts of the world, and storage, have no unfinished files."""
        for machine in set(self.machines):
            disk = ram_disk.RamDisk(self.sim.roots[machine], run=simulated_world.RUN)
            for slot, step_id in disk.all_saves():
                listed = disk.manifest(slot, step_id)
                directory = pathlib.Path(disk.step_directory(slot, step_id))
                named = {disk.manifest_path(slot, step_id).name, *named_files(listed)}
                there = {
                    str(path.relative_to(directory))
                    for path in directory.rglob("*")
                    if path.is_file() and path.name != "zarr.json"
                }
                assert there - {preserved.FILE} <= named
                # What went bad and no host has read since is not put right.
                assert self._is_spoilt or named <= there
        if not self._is_spoilt:
            # An upload of parts that went bad waits for good ones.
            left = self.sim.storage.glob("*.orbax-checkpoint-tmp*")
            assert not [each for each in left if each.suffix != ".aside"]

    def sure_steps(self):
        """The saves that storage has to have by their numbers."""
        return [
            each
            for each in self.model.saves.values()
            if each.is_stored and self.head is not None and each in self.head.line()
        ]

    def _out_of_reach(self):
        heard = set().union(*(self._heard[n] for n in self.machines))
        known = set(self._heard)
        return frozenset(known - heard) | frozenset(self.sim.network.failing)

    def _note_events(self):
        # The product says what it has done.
        events, self.sim.events[:] = list(self.sim.events), []
        distinct = len(set(self.machines)) == len(self.machines) > 1
        can_copy = distinct and self._tiers.get("copies", 1) > 0
        newest = None
        for name, fields in events:
            save = self._by_step.get(fields.get("step"))
            if save is None:
                continue
            if name == "saved":
                self.model.commit(save, self.machines)
                newest = save
                if not can_copy:
                    self.model.copy(save, 0, self.machines)
            elif name == "replicated":
                # It is safe without any one of its machines, whatever else happened to
                # them. What machines outside of this world alone have is not copied.
                are_here = save.machines <= set(self.machines)
                self.model.copy(save, int(can_copy and are_here), self.machines)
            elif name == "backed_up":
                self.model.store(save)
        if newest is not None:
            self.model.collect(newest)


def named_files(listed):
    """The files that a manifest of a RAM disk lists."""
    leaves = listed.contents.leaves
    return [layout.part_file(leaves[leaf], box) for leaf, box, _ in listed.rows()]


def _save_more(world, step):
    # A restore that finds it fails: no model knows it.
    for number in range(step, step + 3):
        state, data = simulated_world.state_of(0), simulated_world.Position(0)
        world.save_checkpointables(number, {"state": state, "data": data})
        world.wait()
