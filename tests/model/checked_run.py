"""A run in a simulation beside its model: each act is done to both, and compared.

An act in which hosts end (a crash, a message that is lost) ends the world; the next act
is then `open`.
"""

from __future__ import annotations

import contextlib
import pathlib

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import leases
from elastic_ckpt.tiers.ram import ram_disk
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
      **tiers: see `Simulation.open`.
    """

    def __init__(
        self,
        directory,
        *,
        num_machines=4,
        stored_steps=None,
        in_place=False,
        **tiers,
    ):
        self.sim = simulated_world.Simulation(
            pathlib.Path(directory), num_machines=num_machines, in_place=in_place
        )
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
        self.sim.end()
        self.sim.files.full_at = None
        self.sim.threads.late = frozenset()
        self.sim.network.failing.clear()

    def close(self):
        """Closes the world, which first does all that it has begun."""
        with self._may_end():
            try:
                self.sim.world.close()
            except errors.NotStoredError:
                # It says so, and something has failed.
                assert self._is_spoilt or self.sim.hosts.is_broken
            self._note_events()
            self.sim.hosts = self.sim.world = None

    def open(self, machines):
        """Begins a world on some machines, which restores the newest step."""
        self.machines = tuple(machines)
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
            world.begin_anew()

    def load(self, step, *, go_back=None):
        """Loads a step by its number, which has to be sure."""
        with self._may_end():
            head = self.head
            self.sim.world.wait()
            self._note_events()
            self._load(step, frozenset(), go_back=go_back)
            if go_back is False:
                self.head = head

    def _load(self, step, out_of_reach, *, go_back=None):
        position = simulated_world.Position()
        restored = self.sim.world.load_checkpointables(
            step,
            {"state": simulated_world.abstract(), "data": position},
            go_back=go_back,
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
                    assert not save.stored

    def preempt(self, step, *, loses_memory):
        """Saves a last step; the copies and the backup are left to the next world."""
        self.sim.is_left, self.sim.loses_memory = True, loses_memory
        self.save(step)
        if self.is_open:
            self.close()

    def flip(self, machine, number):
        """Flips a bit of what a machine has in RAM; whether there was any."""
        disk = ram_disk.RamDisk(self.sim.roots[machine], run=simulated_world.RUN)
        files = []
        for slot, step_id in disk.all_saves():
            with contextlib.suppress(errors.CheckpointError):
                listed = disk.manifest(slot, step_id)
                names = [*listed.fragments.files]
                names += [each.path for each in listed.component_files]
                directory = disk.step_directory(slot, step_id)
                files += [directory / name for name in names]
        if not files:
            return False
        path = files[number % len(files)]
        content = bytearray(path.read_bytes())
        content[number % len(content)] ^= 1
        path.write_bytes(content)
        self._is_spoilt = True
        self.model.lose(machine)
        return True

    def check_nothing_is_left(self):
        """Checks that the hosts of the world, and storage, have no unfinished files."""
        for machine in set(self.machines):
            disk = ram_disk.RamDisk(self.sim.roots[machine], run=simulated_world.RUN)
            for slot, step_id in disk.all_saves():
                listed = disk.manifest(slot, step_id)
                directory = pathlib.Path(disk.step_directory(slot, step_id))
                named = {disk.manifest_path(slot, step_id).name}
                named |= {*listed.fragments.files}
                named |= {each.path for each in listed.component_files}
                there = {
                    str(path.relative_to(directory))
                    for path in directory.rglob("*")
                    if path.is_file() and path.name != "zarr.json"
                }
                assert there - {preserved.FILE} == named
        if not self._is_spoilt:
            # An upload of parts that went bad waits for good ones.
            assert not list(self.sim.storage.glob("*.orbax-checkpoint-tmp*"))

    def sure_steps(self):
        """The saves that storage has to have by their numbers."""
        return [
            each
            for each in self.model.saves.values()
            if each.stored and self.head is not None and each in self.head.line()
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
