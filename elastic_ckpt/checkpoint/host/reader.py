"""One host's side of a restore: reporting its parts, searching, and reading.

    offer_saves, survey    list the steps that hosts and storage have
    offer, examine         look at the parts of each step until a step is complete
    open_step              passes the step's table to every host
    select, read           plan and do each host's reads
    repair                 repairs bad copies

Reports go up to host 0, which reads the manifests in storage; the step's table goes
down to all hosts (`exchange`). A host that does not receive the table, or whose world
has no agents, reads the manifests itself.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.checkpoint.host import (
    capture,
    component_files,
    trees,
    verified_read,
)
from elastic_ckpt.checkpoint.host.answers import (
    Candidate,
    CheckpointMetadata,
    ReadParts,
    SearchableSteps,
)
from elastic_ckpt.checkpoint.host.exchange import GIVEN, Report
from elastic_ckpt.checkpoint.host.verified_read import (
    BadCopy,
    OtherTree,
    VerifiedReader,
)
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import calls, errors, storage
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.manifest import Contents, Manifest
from elastic_ckpt.steps.read_plan import NEARNESS, Nearness
from elastic_ckpt.steps.search import Looked, Search
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import secret
from elastic_ckpt.tiers.peers.peer import Peer
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.tiers.source import ReadError, SourceTier


class HostReader:
    """Reads the parts that one host needs."""

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._exchange = world.mail
        # On host 0: storage as listed for the search, the saves that stock Orbax steps
        # count as, the hosts' reports, and the examined steps.
        self._storage: SourceTier | None = None
        self._foreign: Mapping[int, str] = {}
        self._reported = Report()
        self._examined: dict[StepId, FoundStep] = {}
        self._restoring: _Restoring | None = None
        # The step read last.
        self._last: FoundStep | None = None

    @calls.call(order="up")
    def offer_saves(self) -> None:
        """Offers the steps that this host reports on; see `Exchange.offer`."""
        world = self._world
        if world.passes:
            peers = world.idle_peers([world.number])
            saves = {*world.disk.known_saves(self._slots()), *find.saves(peers)}
            refusing = [each.url for each in peers if each.listing().is_refused]
            self._exchange.offer(Report(saves=sorted(saves), refusing=refusing))

    @calls.call()
    def survey(self) -> SearchableSteps:
        """Lists what all hosts and storage have; called on host 0."""
        world = self._world
        self._examined, self._reported = {}, self._exchange.merged
        self._storage, self._foreign, out_of_reach = None, {}, None
        stored, recorded = [], []
        if tier := world.persistent:
            try:
                stored, recorded = tier.known_saves(), tier.recorded_lines()
                self._foreign, self._storage = tier.foreign_saves(), tier
            except errors.CheckpointError as error:
                out_of_reach = str(error)
        # Host 0 also reports on idle machines for silent hosts.
        idle = world.idle_peers(self._reported.silent)
        ram = idle if world.passes else world.ram_tiers
        known = {*self._reported.saves, *find.saves(ram), *stored}
        peers = [tier for tier in ram if isinstance(tier, Peer)]
        refusing = [*self._reported.refusing]
        refusing += [each.url for each in peers if each.listing().is_refused]
        return SearchableSteps(
            saves=(*known, *self._foreign_steps()),
            lines=tuple(recorded),
            out_of_reach=out_of_reach,
            refusing=tuple(map(self._refused, refusing)),
            nothing=self._nothing(),
        )

    @calls.call(order="up")
    def offer(self, step: int) -> None:
        """Offers this host's parts of a step; see `Exchange.offer`."""
        if self._world.passes:
            own = self._world.disk.offers(step, slots=self._slots())
            # Each host reports on some of the idle machines.
            idle = find.offered(self._world.idle_peers([self._world.number]), step)
            manifests = [each.manifest for each in (*own.held, *idle.held)]
            problems = [*own.problems, *idle.problems]
            self._exchange.offer(Report(manifests=manifests, problems=problems))

    @calls.call(limit_secs=calls.LONG_SECS)
    def examine(self, step: int) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Returns a step's saves on all hosts and in storage, and the problems found.

        Raises:
          LaterVersionError: if a later version of elastic_ckpt wrote the step in
            storage.
        """
        if self._world.passes:
            told = self._exchange.merged
            idle = self._world.idle_peers(told.silent)
            there = find.offered([*idle, *self._stored], step)
            manifests = [*told.manifests, *(each.manifest for each in there.held)]
            looked = self._looked(manifests, [*told.problems, *there.problems])
        else:
            tiers = [*self._world.ram_tiers, *self._stored]
            looked = find.looked(find.offered(tiers, step))
        self._examined |= {each.step_id: each for each in looked.saves}
        return self._candidates(step, looked.saves), tuple(looked.problems)

    @calls.call()
    def complete_steps(self) -> tuple[CheckpointMetadata, ...]:
        """The complete steps in ascending order, without abandoned steps.

        Includes steps that stock Orbax saved.
        """
        survey = self.survey()
        if survey.out_of_reach is not None:
            logging.warning("steps in storage are not listed: %s", survey.out_of_reach)
        tiers = [*self._world.ram_tiers, *self._stored]
        saves = [*find.saves(tiers), *self._foreign_steps()]

        def look(step: int) -> Looked[Candidate]:
            looked = find.looked(find.offered(tiers, step))
            return Looked(self._candidates(step, looked.saves), looked.problems)

        complete = Search(saves, look, lines=survey.lines).complete_steps()
        return tuple(each.checkpoint for each in complete)

    @calls.call(order="down", limit_secs=calls.LONG_SECS)
    def open_step(self, step_id: StepId) -> None:
        """Opens a step for reading and passes its table on to other hosts.

        Raises:
          CheckpointError: if the step is not complete in the tiers that this host can
            reach.
        """
        self._release()
        found = self._examined.get(step_id)
        if self._world.passes and found is not None:
            self._exchange.post(GIVEN, found.table.manifest.to_bytes())
        elif self._world.passes and self._world.number:
            try:
                given = Manifest.parse(self._exchange.take(GIVEN))
                found = self._world.found([given])
            except (errors.CheckpointError, ReadError, ValueError) as error:
                logging.warning("the table of step %d %s", step_id.step, error)
            if found is not None and found.step_id != step_id:
                found = None
        if found is None:
            # The step was not searched for, or its table did not arrive.
            found = find.of_save(self._world.tiers, step_id)
        domain = self._world.copy_policy.domain
        near = Nearness(found.table, self._world.own.host, domain=domain)
        maps = not self._world.chosen.is_read_only
        self._restoring = _Restoring(found, VerifiedReader(found, near, maps=maps))

    @calls.call()
    def opened(self) -> Contents:
        """The contents of the open step."""
        return self._opened().reader.table.contents

    def select(
        self,
        wanted: Sequence[trees.WantedLeaf],
        components: Sequence[str],
        others: Mapping[str, OtherTree] = types.MappingProxyType({}),
    ) -> dict[str, str]:
        """Selects the parts of the step to read.

        Args:
          wanted: the leaves that this host needs, in their saved shapes.
          components: the names of the requested components.
          others: trees with a different layout, by name.

        Returns:
          The saved dtypes, keyed by leaf path.

        Raises:
          CheckpointError: if the step does not contain a requested component.
        """
        restoring, contents = self._opened(), self.opened()
        missing = sorted(set(components).difference(contents.components))
        if missing:
            there = {leaf.checkpointable for leaf in contents.arrays}
            raise errors.CheckpointError(
                f"step {restoring.found.step_id.step} does not contain"
                f" {missing}; request only what it contains:"
                f" {sorted(there.union(contents.components))}"
            )
        restoring.wanted, restoring.others = wanted, others
        saved = {leaf.path: leaf.dtype for leaf in contents.leaves}
        return {leaf.path: saved[leaf.path] for leaf in wanted}

    @calls.call(limit_secs=calls.LONG_SECS)
    def read(self, components: tuple[str, ...]) -> ReadParts:
        """Reads and verifies all selected parts; see `read_leaves`, `materialize`."""
        self.read_leaves()
        return self.materialize(components)

    def read_leaves(self, some: slice = slice(None)) -> None:
        """Reads and verifies the selected leaves of the step, or some of them.

        Args:
          some: the leaves to read, in the order in which they were selected.

        Raises:
          CheckpointError: if no good copy of a part is left.
        """
        restoring = self._opened()
        # Frees the values read before, which are on the devices.
        restoring.placed, restoring.some = {}, restoring.wanted[some]
        restoring.placed = verified_read.read_leaves(restoring.reader, restoring.some)
        restoring.others_made = {
            name: read(restoring.reader) for name, read in restoring.others.items()
        }

    @calls.call(limit_secs=calls.LONG_SECS)
    def materialize(self, components: tuple[str, ...]) -> ReadParts:
        """Writes the verified files of components, once all leaves are read."""
        reader, contents = self._opened().reader, self.opened()
        assert reader.near is not None
        read_bytes: collections.Counter[str] = collections.Counter()
        for holder, num_bytes in reader.read_bytes.items():
            read_bytes[NEARNESS[reader.near.of_holders[holder]]] += num_bytes
        for name in components:
            storage.make_directory(self._files() / name)
        for number in contents.files.values():
            leaf = contents.leaves[number]
            if leaf.checkpointable in components:
                content = b""
                for item in reader.of_leaf(number):
                    content = reader.values(item).tobytes()
                storage.write_atomic(self._files() / leaf.path, content)
        # No step of the search will be opened again.
        self._examined = {}
        bad = tuple(dict.fromkeys(reader.bad))
        return ReadParts(num_bytes=read_bytes, directory=str(self._files()), bad=bad)

    @calls.call()
    def files(self, component: str) -> dict[str, bytes]:
        """The content of a component's materialized files, keyed by path."""
        return component_files.read(self._files() / component)

    def arrays(self, of_trees: Mapping[str, Any]) -> dict[str, Any]:
        """Builds all trees from the read values, including trees with other layouts."""
        made = self.made()
        rebuilt = {
            name: trees.rebuilt(tree, name, made) for name, tree in of_trees.items()
        }
        arrays = {**rebuilt, **self._opened().others_made}
        local, own = self._world.chosen.local, self._world.own
        if local is not None and not self._world.chosen.is_read_only:
            capture.prepare(trees.arrays(arrays), own, local.pinned_bytes)
        return arrays

    def made(self) -> dict[str, Any]:
        """Builds the leaves read last, by path, from their placed boxes."""
        restoring = self._opened()
        return {
            leaf.path: leaf.join(restoring.placed[leaf.path]) for leaf in restoring.some
        }

    @calls.call(limit_secs=calls.LONG_SECS)
    def repair(self, bad: tuple[BadCopy, ...]) -> tuple[str, ...]:
        """Repairs bad copies of the step that was read.

        Each host repairs its own copies and a share of the copies on idle machines.

        Returns:
          The names of the repaired parts.
        """
        world = self._world
        if world.chosen.is_read_only:
            return ()
        places = {(each.host, each.name) for each in bad if each.tier == "local"}
        present = {host.id for host in world.hosts}
        idle = sorted(each for each in places if each[0] not in present)
        own = {each for each in places if each[0] == world.own.host.id}
        dealt = own.union(idle[world.number :: len(world.hosts)])
        return tuple(self._opened().reader.repair(dealt))

    @calls.call()
    def close_step(self) -> None:
        """Releases the open step, its values and messages."""
        self._release()
        self._exchange.end()

    @calls.call()
    def hold(self, step_id: StepId) -> bool:
        """Makes this host copy and back up a step that was read.

        Returns:
          Whether the step is completely in RAM.
        """
        last, self._last = self._last, None
        if last is None or last.step_id != step_id:
            return False
        return self._world.hold(last)

    @property
    def _stored(self) -> list[SourceTier]:
        return [] if self._storage is None else [self._storage]

    def _slots(self) -> set[int]:
        # A host reports on its slot. The host in a machine's first slot also reports on
        # slots that do not belong to any host of the world.
        own, disk = self._world.own.slot, self._world.disk
        others = [slot for slot in disk.slots() if slot != own] if own == 0 else []
        ids = {host.id for host in self._world.hosts} if others else set()
        return {own, *(slot for slot in others if disk.host_id(slot) not in ids)}

    def _looked(
        self, manifests: Sequence[Manifest], problems: list[str]
    ) -> Looked[FoundStep]:
        # The saves of a step that hosts have reported.
        saves = []
        for group in manifest.grouped(manifests):
            try:
                saves.append(self._world.found(group))
            except errors.CheckpointError as error:
                problems.append(str(error))
        return Looked(saves, problems)

    def _foreign_steps(self) -> list[StepId]:
        return [StepId(step, "") for step in self._foreign]

    def _candidates(
        self, step: int, saves: Iterable[FoundStep]
    ) -> tuple[Candidate, ...]:
        # Newest first; steps that stock Orbax saved are complete.
        found = [Candidate(self._described(each), each.problem) for each in saves]
        if step in self._foreign:
            assert self._world.persistent is not None
            by_orbax = CheckpointMetadata(
                step=step,
                save="",
                line=(StepId(step, self._foreign[step]),),
                path=self._path(step),
                **self._world.persistent.notes(step),
            )
            found.append(Candidate(by_orbax, None))
        return tuple(sorted(found, key=lambda each: each.step_id, reverse=True))

    def _described(self, found: FoundStep) -> CheckpointMetadata:
        contents, step_id = found.table.contents, found.step_id
        is_stored = any(each.tier == "persistent" for each in found.table.holders)
        return CheckpointMetadata(
            step=step_id.step,
            save=step_id.save,
            line=step_id.after(contents.parents),
            path=self._path(step_id.step) if is_stored else None,
            metrics=json.loads(contents.metrics or "null"),
            custom_metadata=json.loads(contents.custom_metadata or "null"),
            commit_timestamp_nsecs=1_000_000 * contents.time_ms,
        )

    def _path(self, step: int) -> epath.Path:
        assert self._world.root is not None
        return self._world.root.final(step)

    def _nothing(self) -> str:
        # Says why there is no step; used in messages.
        places = [] if self._world.root is None else [self._world.root.path]
        if self._world.chosen.local is not None:
            places.append(self._world.disk.root)
        named = " or ".join(map(str, places))
        if not any(each.exists() for each in places):
            return f"there is no directory {named}"
        return f"{named} has no checkpoints yet"

    def _refused(self, url: str) -> str:
        known = secret.path(self._world.disk.root)
        return (
            f"{url} rejects the secret in {known}, so parts of this run there cannot"
            " be restored; copy that file from one of the run's machines, such as the"
            " agent's, and restart this program"
        )

    def _release(self) -> None:
        if self._restoring is not None:
            self._last = self._restoring.found
        self._restoring = None
        storage.remove(self._files())

    def _files(self) -> epath.Path:
        # With a single controller, the path must be the same on all machines.
        slot = self._world.disk.host_directory(self._world.own.slot)
        return slot / ram_disk.RESTORED

    def _opened(self) -> _Restoring:
        assert self._restoring is not None
        return self._restoring


@dataclasses.dataclass(eq=False)
class _Restoring:
    found: FoundStep
    reader: VerifiedReader
    wanted: Sequence[trees.WantedLeaf] = ()
    some: Sequence[trees.WantedLeaf] = ()
    placed: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    others: Mapping[str, OtherTree] = dataclasses.field(default_factory=dict)
    others_made: Mapping[str, Any] = dataclasses.field(default_factory=dict)
