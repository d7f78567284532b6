"""Follows a live run's steps as they become complete, in storage or in the run's RAM.

A program that evaluates, exports or serves steps need not be part of the run or use the
run's devices:

    for step in ec.watch_steps("gs://bucket/run/checkpoints"):
        loss = evaluate(step.load({"params": abstract_params}))
        ec.record_metrics(step, {"eval_loss": loss})

The run's retention uses the metrics as if the run had evaluated the step itself.

With the run's secret, steps can also be followed in the RAM of the hosts, which save
far more often to RAM than to storage. The run records its agents in storage
(`run_files`). The follower asks one agent at a time for its list of steps. Only when
the list has a new save does it ask all agents and search their manifests as in a
restore (`tiers.find`). RAM has only the newest steps, so the follower always takes the
newest one, which may be gone before it is read. So, before it yields a step, the
follower reads the leaves that were loaded from the previous step; if that fails, it
skips the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from elastic_ckpt.checkpoint import foreign_steps, structure
from elastic_ckpt.checkpoint.host import trees, verified_read
from elastic_ckpt.core import boxes, bucket_clients, errors, storage
from elastic_ckpt.steps import owners, read_plan
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import peer, peer_client, secret
from elastic_ckpt.tiers.persistent import claims, leases, persistent_root, run_files
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.persistent_tier import PersistentTier
from elastic_ckpt.tiers.ram import machine

_POLL_SECS = 10.0
# How often to ask an agent for its list of steps, with one small request.
_RAM_POLL_SECS = 0.2
# How often to warn that the directory does not exist.
_WARN_SECS = 600
# The maximum number of agents to try for a list of steps.
_MOST_ASKED = 3
# The keys of a state's weights.
_WEIGHTS = ("params", "model")


class Step:
    """A complete step of a followed run, from `ec.watch_steps`.

    Attributes:
      step: the number of the training step.
      save: the name of the save, which distinguishes saves of the same step by a run
        that rolled back; empty if stock Orbax saved the step.
    """

    def __init__(
        self,
        step_id: StepId,
        *,
        _run: str,
        _follower: _Follower,
        _in_ram: find.FoundStep | None = None,
    ) -> None:
        self.step, self.save = step_id
        self._run, self._follower, self._in_ram = _run, _follower, _in_ram

    def __repr__(self) -> str:
        where = self._follower.root.final(self.step)
        return f"Step({self.step}, in {'RAM' if self._in_ram else where})"

    @property
    def path(self) -> epath.Path:
        """The step directory in persistent storage.

        Raises:
          CheckpointError: if the step is in the run's RAM, where it has no directory.
        """
        if self._in_ram is not None:
            raise errors.CheckpointError(
                f"step {self.step} is in the RAM of its run, so it has no directory;"
                " load it with step.load(tree), or call ec.watch_steps without"
                " secret_file to follow the steps in storage"
            )
        return self._follower.root.final(self.step)

    def load(self, tree: Any = None, *, checkpointable_name: str = "state") -> Any:
        """Loads leaves of the step and compares them with their saved digests.

        Leaves that have not changed since the previous step are not read again.

        Args:
          tree: the requested leaves, in their saved structure, such as
            `{"params": abstract_params}`; other leaves are skipped. For an array or
            `jax.ShapeDtypeStruct`, the loaded leaf has the same sharding; for an object
            with only a shape and a dtype, it is a read-only NumPy array. None requests
            the weights: the state's `params` or `model`, or the whole state if it has
            neither.
          checkpointable_name: the name of the tree in the step.

        Returns:
          The tree with the loaded values.

        Raises:
          OtherModelError: if the step lacks a leaf, or has it in a different shape.
          StepGoneError: if the step is gone; a later step may exist.
          CheckpointError: if the step has no tree with that name, or cannot be found.
        """
        if not self.save:
            wanted = {checkpointable_name: tree}
            loaded = foreign_steps.load(self.path, wanted, partial=True)
            return loaded[checkpointable_name]
        found = self._in_ram
        if found is None:
            tier = PersistentTier(self._follower.root, run=self._run)
            found = find.of_save([tier], StepId(self.step, self.save))
        return self._follower.load(found, tree, checkpointable_name)


def watch_steps(
    directory: epath.PathLike,
    *,
    after: int = -1,
    poll_secs: float = _POLL_SECS,
    timeout_secs: float | None = None,
    duration_secs: float = leases.DURATION_SECS,
    secret_file: epath.PathLike | None = None,
    tls_authority: epath.PathLike | None = None,
    max_bytes_per_sec: float | None = None,
) -> Iterator[Step]:
    """Waits for a run's steps and yields each as it becomes complete.

    A lease (`ec.lease`) keeps each step in storage until the next one is requested.
    Steps that the run removes before they are reached are skipped. If the run rolls
    back and saves a step again, the step is yielded again.

    With the run's secret, steps in the RAM of its hosts are also followed. Each yielded
    step is then the newest complete step, and the steps in between are skipped. Before
    a step is yielded, the leaves that `Step.load` loaded from the previous step are
    read; if the step is removed in the meantime, it is skipped. The run needs
    `ec.Peers`, and its agents must be reachable from this process.

    Args:
      directory: the run's steps directory in storage, which need not exist yet. For a
        run without storage, the `ec.Local` directory on one of the run's machines.
      after: the step after which to yield steps; by default, all existing steps are
        yielded.
      poll_secs: the time between checks of storage, in seconds. With a secret, an agent
        is asked more often, and storage is checked only if no step has become complete
        for this long.
      timeout_secs: the time without a new step, in seconds, after which the iteration
        ends; None means never.
      duration_secs: the duration of the leases, in seconds; see `ec.lease`.
      secret_file: a file with the run's secret: the `secret_file` of its `ec.Peers`, or
        `secret` in the `ec.Local` directory on any of its machines. If None, only the
        steps in storage are followed; but if `directory` is an `ec.Local` directory,
        the secret there is used.
      tls_authority: a PEM file with the authority that signs the agents' certificates;
        if it is set, agents that do not encrypt are rejected.
      max_bytes_per_sec: the maximum rate at which to read from agents, in bytes per
        second, in case the run itself needs the network; None sets no limit.

    Yields:
      From storage, all steps in ascending order; from RAM, the newest step.

    Raises:
      CheckpointError: if a step's lease was lost while the step was read.
      RunError: if the file does not contain a secret, or no agent accepts the secret.
      ConfigError: if `tls_authority` cannot be read.
    """
    root, look_secs = PersistentRoot.from_path(directory), poll_secs
    if secret_file is None and _is_ram_disk(root):
        secret_file = secret.path(root.path)
    client = None
    if secret_file is not None:
        look_secs = min(poll_secs, _RAM_POLL_SECS)
        # The working directory may change before the first step is requested.
        file = secret_file = storage.absolute(secret_file)
        secret.read(file)
        client = peer_client.PeerClient(
            lambda: secret.current(file) or "",
            tls_ca=tls_authority,
            max_bytes_per_sec=max_bytes_per_sec,
        )
    follower = _Follower(root, client, secret_file, after=after, poll_secs=poll_secs)
    return _followed(
        follower,
        look_secs=look_secs,
        timeout_secs=math.inf if timeout_secs is None else timeout_secs,
        duration_secs=duration_secs,
    )


def _followed(
    follower: _Follower, *, look_secs: float, timeout_secs: float, duration_secs: float
) -> Iterator[Step]:
    found_secs = time.monotonic()
    while True:
        before, step = follower.last, follower.next()
        if step is not None:
            keep: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if step._in_ram is None:
                keep = leases.lease(step.path, duration_secs=duration_secs)
            try:
                with keep:
                    yield step
                found_secs = time.monotonic()
                continue
            except leases.StepGoneError as error:
                # Looks again, because only an older save of the step may be gone.
                logging.info("%s", error)
                follower.last = before
        if time.monotonic() - found_secs >= timeout_secs:
            return
        time.sleep(min(look_secs, timeout_secs))


def record_metrics(step: Step | epath.PathLike, metrics: Mapping[str, Any]) -> None:
    """Records a saved step's metrics, by which its run ranks the step (`ec.BestN`).

    Any process may call this, during the run or later. The run uses the metrics from
    its next save on. They apply only to this save of the step: if the run rolls back
    and saves the step again, they do not apply to the new save. Metrics of a step that
    was only in RAM apply to the newest earlier step in storage.

    Args:
      step: a step from `ec.watch_steps`, or a step directory in persistent storage.
      metrics: numbers, keyed by metric name, which replace any metrics recorded earlier
        for the step.

    Raises:
      CheckpointError: if the step was not saved by a run of this library, or the
        metrics are not JSON.
      OSError: if storage is unavailable; for a bucket, the client's own error may be
        raised instead.
    """
    if isinstance(step, Step):
        root, number = step._follower.root, step.step
        run, save = step._run, step.save
    else:
        path = storage.absolute(step)
        root = PersistentRoot.from_path(path.parent)
        number = int(path.name) if path.name.isdecimal() else -1
        run, save = persistent_root.committed(root.final(number))
    if _is_ram_disk(root):
        raise errors.CheckpointError(
            f"metrics of step {number} were not recorded: {root.path} is a RAM disk,"
            " but metrics are recorded in persistent storage; pass ec.watch_steps the"
            " directory of the run's ec.Persistent"
        )
    if not run:
        raise errors.CheckpointError(
            f"{step} is not a step that a run of this library has committed; pass the"
            " path of a step directory, PERSISTENT_DIRECTORY/<step>"
        )
    run_files.record_evaluation(
        root,
        run_files.Evaluation(
            run=run,
            step=number,
            save=save,
            metrics=structure.json_of_user("metrics", metrics),
        ),
    )


class _Follower:
    """Finds a run's next step, in storage or in RAM, and loads it.

    Keeps loaded leaves, because the next step may have the same values.

    Args:
      root: the steps directory in storage, where the run records its agents.
      client: a client that reads from agents; None to follow only steps in storage.
      secret_file: the file with the run's secret, used in error messages.
      after: the step after which to yield steps.
      poll_secs: the time between checks of storage while RAM has no new step.

    Attributes:
      last: the last step found.
    """

    def __init__(
        self,
        root: PersistentRoot,
        client: peer_client.PeerClient | None,
        secret_file: epath.PathLike | None,
        *,
        after: int,
        poll_secs: float,
    ) -> None:
        self.root, self._client, self._secret_file = root, client, secret_file
        self._after, self._poll_secs = after, poll_secs
        if client is not None:
            # Steps may still be loaded after the iteration has ended.
            weakref.finalize(self, client.close)
        domains = owners.domains_of_environment()
        self._host = Host(id="follower", number=-1, domains=domains)
        # The trees that were loaded from the current step, with their names.
        self._asked: list[tuple[Any, str]] = []
        # For each leaf path, the leaf's saved boxes with their digests, and its values.
        self._kept: dict[str, tuple[Any, dict[boxes.Box, np.ndarray]]] = {}
        # The run's newest known line.
        self.last, self._line = StepId(-1, ""), Line(save="", parents=())
        # The examined steps in storage.
        self._seen: set[int] = set()
        self._unreadable: dict[StepId, str] = {}
        # The time of the last new step in RAM, or of the last check of storage.
        self._looked_secs = -math.inf
        self._agents = run_files.RunAgents("", {})
        # The later saves of the last search, and when to search for them again.
        self._searched: set[StepId] | None = set()
        self._pause_secs = self._again_secs = 0.0

    def next(self) -> Step | None:
        """Returns the next step, in RAM or committed in storage; None if there is none.

        If RAM is followed, this is the newest step.

        Raises:
          RunError: if no agent accepts the secret.
        """
        if self._client is None:
            self._read_line()
            return self._in_storage()
        is_due = time.monotonic() - self._looked_secs >= self._poll_secs
        if is_due:
            self._read_line()
            self._read_record()
        step = self._in_ram() or (self._in_storage() if is_due else None)
        if step is not None or is_due:
            self._looked_secs = time.monotonic()
        return step

    def load(self, found: find.FoundStep, tree: Any, name: str) -> Any:
        """Loads a step as `Step.load` does.

        Raises:
          StepGoneError: if no good copy of a part is left.
        """
        asked = _resolved(tree, name, found)
        self._asked.append((tree, name))
        wanted = trees.wanted(asked.read)
        try:
            self._read(found, wanted)
        except errors.CheckpointError as error:
            raise leases.StepGoneError(
                f"step {found.step_id.step} can no longer be read ({error}); load the"
                " next step. If the run removes steps faster than they are read here,"
                " make it keep more of them: ec.Local(..., keep=LatestN(3))"
            ) from error
        made = {
            leaf.path: leaf.make([self._kept[leaf.path][1][box] for box in leaf.boxes])
            for leaf in wanted
        }
        return asked.filled({name: trees.rebuilt(asked.read[name], name, made)})[name]

    def _read(self, found: find.FoundStep, wanted: Sequence[trees.WantedLeaf]) -> None:
        # Reads boxes that were not kept or belong to a leaf that has changed.
        table, lacking = found.table, []
        numbers = {leaf.path: n for n, leaf in enumerate(table.contents.leaves)}
        for leaf in wanted:
            number = numbers[leaf.path]
            parts = table.items.take(table.of_leaf(number))
            same = (parts.start, parts.stop, parts.digest)
            saved = table.contents.leaves[number], *(each.tobytes() for each in same)
            if leaf.path not in self._kept or self._kept[leaf.path][0] != saved:
                self._kept[leaf.path] = (saved, {})
            kept = self._kept[leaf.path][1]
            new = tuple(box for box in leaf.boxes if box not in kept)
            keep = functools.partial(_keep, kept, new)
            lacking.append(
                dataclasses.replace(leaf, boxes=new, place=keep, is_moved=False)
            )
        near = read_plan.Nearness(table, self._host)
        verified_read.read_leaves(verified_read.VerifiedReader(found, near), lacking)

    def _is_later(self, step_id: StepId) -> bool:
        # A run that rolled back saves earlier steps under later saves.
        is_new = step_id.step > self.last.step or step_id.save > self.last.save
        is_good = step_id.step > self._after and step_id not in self._unreadable
        return is_new and is_good and not self._line.abandons(step_id)

    def _in_storage(self) -> Step | None:
        # The first later step, or, if RAM is followed, the newest.
        root = self.root
        try:
            steps = root.steps()
            if not (steps or root.path.exists()):
                logging.log_every_n_seconds(
                    logging.WARNING,
                    "watch_steps: there is no directory %s yet; unless a run is about"
                    " to create it, pass the directory of the run's ec.Persistent",
                    _WARN_SECS,
                    root.path,
                )
            # A removed step may be saved again.
            self._seen.intersection_update(steps)
            for step in steps if self._client is None else steps[-1:]:
                # Only the newest step can be overwritten.
                if step <= self._after or (step in self._seen and step != steps[-1]):
                    continue
                run, save = persistent_root.committed(root.final(step))
                later = StepId(step, save or root.foreign_save(step))
                # This includes a listed step that is being removed; it is skipped.
                self._seen.add(step)
                if self._is_later(later):
                    self.last, self._asked = later, []
                    return Step(StepId(step, save), _run=run, _follower=self)
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            logging.warning(
                "the steps in %s cannot be followed now: %s", root.path, error
            )
        return None

    def _read_line(self) -> None:
        # The line identifies abandoned steps, which stay in storage while leased.
        try:
            newest = claims.newest(self.root.path)
        except errors.CheckpointError as error:
            logging.warning("the run may have rolled back: %s", error)
            return
        lines = [self._line, *([newest.line] if newest else [])]
        self._line = max(lines, key=lambda line: line.save)

    def _read_record(self) -> None:
        root = self.root
        try:
            agents = run_files.read_agents(root.path)
            self._agents = agents or self._agents
            if agents is None and self._looked_secs == -math.inf:
                logging.warning(
                    "watch_steps: %s lists no agents, so only steps in storage are"
                    " followed; a run with ec.Local and ec.Peers records its agents"
                    " when it starts",
                    root.path / run_files.AGENTS,
                )
        except errors.CheckpointError as error:
            logging.warning("the run's list of agents may be outdated: %s", error)

    def _in_ram(self) -> Step | None:
        # One agent's list shows whether to search, because each has parts of every
        # step.
        urls = list(self._agents.urls.values())
        some = map(self._peer, random.sample(urls, min(_MOST_ASKED, len(urls))))
        asked = next((each for each in some if not each.listing().problem), None)
        # None means that none of these agents responds.
        later = {*filter(self._is_later, asked.known_saves())} if asked else None
        now_secs, is_again = time.monotonic(), later == self._searched
        if later == set() or (is_again and now_secs < self._again_secs):
            return None
        # Searches at growing intervals while the same saves stay incomplete.
        more_secs = min(2 * self._pause_secs, self._poll_secs)
        self._pause_secs = more_secs if is_again else _RAM_POLL_SECS
        self._searched, self._again_secs = later, now_secs + self._pause_secs
        peers = list(map(self._peer, urls))
        search = find.search(peers, lines=[self._line], without=self._unreadable)
        self._line, found = search.line, search.newest().found
        refusing = [each.url for each in peers if each.listing().is_refused]
        if refusing and not any(each.listing().manifests for each in peers):
            raise errors.RunError(
                f"{', '.join(refusing)}: no agent of the run accepts the secret in"
                f" {self._secret_file}; pass a copy of the `secret` file from the"
                " ec.Local directory on any of the run's machines, or a"
                " copy of the file that the run passes as ec.Peers(secret_file=...)"
            )
        if found is None or not self._is_later(found.step_id):
            return None
        return self._begun(found)

    def _begun(self, found: find.FoundStep) -> Step | None:
        # A step in RAM, after reading the leaves that were loaded from the previous
        # step.
        asked, self._asked = self._asked, []
        wanted = []
        for tree, name in asked:
            # If the tree does not match this step, a later load reports that.
            with contextlib.suppress(errors.ElasticCkptError):
                wanted.append(trees.wanted(_resolved(tree, name, found).read))
        try:
            for of_tree in wanted:
                self._read(found, of_tree)
        except errors.CheckpointError as error:
            logging.info("step %d is skipped: %s", found.step_id.step, error)
            self._unreadable[found.step_id] = str(error)
            return None
        self.last, self._unreadable = found.step_id, {}
        return Step(found.step_id, _run=found.table.run, _follower=self, _in_ram=found)

    def _peer(self, url: str) -> peer.Peer:
        assert self._client is not None
        return peer.Peer(url, self._client, self._agents.run)


def _resolved(tree: Any, name: str, found: find.FoundStep) -> structure.AskedTrees:
    # Matches the requested trees with the step; other leaves are omitted.
    saved = structure.saved_trees(found.table.contents)
    if tree is None:
        whole: Any = saved.get(name)
        weights = [k for k in _WEIGHTS if isinstance(whole, Mapping) and k in whole]
        tree = {key: whole[key] for key in weights[:1]} or None
    asked = structure.resolve(
        {name: tree},
        saved,
        what=f"step {found.step_id.step}",
        partial=True,
        may_add=False,
    )
    for path, leaf in trees.leaves(asked.read).items():
        sharding = getattr(leaf, "sharding", None)
        if not getattr(sharding, "is_fully_addressable", True):
            raise errors.ConfigError(
                f"{path} is requested on devices of multiple processes, which may be at"
                " different steps; follow the run in one process, request shardings"
                " over jax.local_devices(), and broadcast the values to the other"
                " processes"
            )
    return asked


def _keep(
    kept: dict[boxes.Box, np.ndarray],
    new: Sequence[boxes.Box],
    number: int,
    values: np.ndarray,
) -> None:
    # Callers get these arrays, and the next load returns them again.
    values.flags.writeable = False
    kept[new[number]] = values


def _is_ram_disk(root: PersistentRoot) -> bool:
    return not root.in_place and machine.find(root.path) is not None
