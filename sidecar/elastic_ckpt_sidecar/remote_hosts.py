"""The head's handle of all hosts of a world, whose agents run beside the accelerators.

It is what `checkpoint.hosts` calls `Hosts`: whoever drives saves and restores does the
same with it as with the hosts of a multi-controller world. Phases and answers are
letters, and arrays stay on their hosts.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding

from elastic_ckpt.core import background, storage, topology
from elastic_ckpt.data import compatibility
from elastic_ckpt.host.hosts_failed import HostsFailed
from elastic_ckpt.host.trees import arrays as captured_leaves
from elastic_ckpt.host.trees import asked, rebuilt
from elastic_ckpt.manifests.manifest import Contents, Leaf
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt_sidecar import (
    component_files,
    failures,
    head_arrays,
    host_agent,
    letters,
    worker,
)
from elastic_ckpt_sidecar.array_layout import Group
from elastic_ckpt_sidecar.head_arrays import HostDevices

# The longest pause between two questions whether hosts have answered.
_POLL_SECS = 0.2


def hosts_of(mesh: Mesh) -> list[HostDevices]:
    """The hosts of a mesh, in its order: devices whose workers are one process.

    Raises:
      ConfigError: if hosts differ from the head in what they need to have in common.
    """
    accelerators = tuple(mesh.devices.flat)
    cpus = tuple(colocated_python.colocated_cpu_devices(accelerators))
    with failures.reaching_the_head():
        told = letters.rows(worker.Facts(letters.letter({}, _over(cpus))))
    facts = compatibility.from_rows(told)
    compatibility.check([compatibility.local_facts(role="the head"), *facts])
    found: dict[str, list[int]] = {}
    for number, fact in enumerate(facts):
        found.setdefault(fact[compatibility.HOST], []).append(number)
    return [
        HostDevices(
            accelerators=tuple(accelerators[n] for n in of),
            cpus=tuple(cpus[n] for n in of),
        )
        for of in found.values()
    ]


class RemoteHosts:
    """All hosts of a world under a single controller.

    Args:
      hosts: their devices.
      choices: what each is to be, in the same order.
    """

    # The number of the host whose paths mean the same here.
    own = 0

    def __init__(
        self, hosts: Sequence[HostDevices], choices: Sequence[host_agent.HostChoice]
    ) -> None:
        self._agent = host_agent.HostAgent(tuple(choices))
        self._arrays = head_arrays.HeadArrays(hosts)
        self._everyone = _over([host.cpus[0] for host in hosts])
        self._first = _over([hosts[0].cpus[0]])
        self._root = choices[0].directory
        self._numbers = itertools.count()
        self._layouts: dict[tuple[Group, ...], int] = {}
        # Whether it does not see the memory of host 0, and has copies of files there.
        self._away = False
        self._directory = ""
        self._restored: list[str] = []
        self._tell(
            self._agent.meet, {}, _over([d for host in hosts for d in host.cpus])
        )
        # Also when nobody calls `close`.
        background.close_with(self, functools.partial(_release, self._agent))

    def all(self, phase: str, *arguments: Any) -> list[Any]:
        """See `Hosts`."""
        if phase == "saver.write" and self._away:
            self._send_files(*arguments)
        answers = self._ask(self._everyone, phase, arguments)
        if phase == "world.introduce":
            # A head that shares the memory of host 0 finds its id there.
            seen = machine.find(self._root)
            self._away = seen != answers[0]["machine"]
        if phase == "reader.materialise" and self._away:
            self._restored.append(answers[0])
            component_files.write(answers[0], self.first("files.get", answers[0]))
        if phase == "reader.forget":
            while self._restored:
                storage.remove(self._restored.pop())
        return answers

    def first(self, phase: str, *arguments: Any) -> Any:
        """See `Hosts`."""
        return self._ask(self._first, phase, arguments)[0]

    def capture(self, step: int, save: str, trees: Mapping[str, Any]) -> str:
        """See `Hosts`."""
        groups, values = self._arrays.to_save(captured_leaves(trees))
        layout = self._layout(groups)
        for number, (group, of_group) in enumerate(zip(groups, values, strict=True)):
            content = {
                "layout": layout,
                "group": number,
                "kept": self._arrays.apart and group.leaves[0].spec is not None,
            }
            arrays = head_arrays.beside(group, of_group)
            self._tell(self._agent.hold, content, _over(group.mesh), *arrays)
        try:
            self._directory = self.all("arrays.capture", step, save, layout)[0]
        except HostsFailed:
            self.all("saver.abandon", step, save)
            raise
        return self._directory

    def opened(self) -> Contents:
        """See `Hosts`."""
        told = self.first("reader.contents")
        leaves = [
            Leaf(path=path, shape=tuple(shape), dtype=dtype)
            for path, shape, dtype in told.pop("leaves")
        ]
        return Contents(leaves=tuple(leaves), **told)

    def check(self, trees: Mapping[str, Any], components: Sequence[str]) -> None:
        """See `Hosts`."""
        groups, _ = self._arrays.to_restore(asked(trees))
        self.all("arrays.want", self._layout(groups), components)

    def arrays(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        """See `Hosts`."""
        groups, wanted = self._arrays.to_restore(asked(trees))
        layout = self._layout(groups)
        dtypes = self.first("arrays.dtypes")
        made: dict[str, Any] = {}
        for number, (group, of_group) in enumerate(zip(groups, wanted, strict=True)):
            abstract = [group.abstract(leaf, dtypes) for leaf in group.leaves]
            take = self._agent.arrays.specialize(
                out_specs_fn=functools.partial(_whatever_is_asked, abstract)
            )
            with failures.reaching_the_head():
                content = {"layout": layout, "group": number}
                arrays = take(letters.letter(content, _over(group.mesh)))
            made |= head_arrays.restored(group, arrays, of_group, dtypes)
        return {name: rebuilt(tree, name, made) for name, tree in trees.items()}

    def close(self) -> None:
        """See `Hosts`."""
        try:
            self.all("close")
        finally:
            _release(self._agent, wait=True)

    def _layout(self, groups: tuple[Group, ...]) -> int:
        known = self._layouts.get(groups)
        if known is None:
            known = len(self._layouts)
            told = [group.to_json() for group in groups]
            self.all("arrays.describe", known, told)
            self._layouts[groups] = known
        return known

    def _send_files(
        self, step: int, save: str, components: Sequence[str], problem: str | None
    ) -> None:
        files = component_files.take(self._directory, components)
        if files and problem is None:
            self.first("files.put", step, save, files)

    def _ask(
        self, sharding: NamedSharding, phase: str, arguments: Sequence[Any]
    ) -> list[Any]:
        call = next(self._numbers)
        content = {"call": call, "phase": phase, "arguments": arguments}
        lengths = self._tell(self._agent.begin, content, sharding)
        pause = 0.001
        while (lengths == host_agent.UNDER_WAY).any():
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECS)
            lengths = self._tell(self._agent.lengths, {"call": call}, sharding)
        chunks = []
        longest = int(lengths.max())
        for start in range(0, longest, host_agent.CHUNK_BYTES):
            last = start + host_agent.CHUNK_BYTES >= longest
            content = {"call": call, "start": start, "last": last}
            chunks.append(self._tell(self._agent.answers, content, sharding))
        answers = [json.loads(row.tobytes()) for row in np.concatenate(chunks, axis=1)]
        failed = {
            number: failures.in_words(answer["failed"])
            for number, answer in enumerate(answers)
            if "failed" in answer
        }
        if failed:
            raise HostsFailed(failed)
        return [answer["is"] for answer in answers]

    def _tell(
        self, method: Any, content: Any, sharding: NamedSharding, *arrays: jax.Array
    ) -> np.ndarray:
        with failures.reaching_the_head():
            return letters.rows(method(letters.letter(content, sharding), *arrays))


def _over(devices: Mesh | Sequence[jax.Device]) -> NamedSharding:
    # Of letters, a row for each device.
    if not isinstance(devices, Mesh):
        devices = Mesh(np.array(devices), ("device",))
    return topology.batch_sharding(devices)


def _whatever_is_asked(abstract: list[Any], *_: Any) -> list[Any]:
    return abstract


def _release(agent: Any, *, wait: bool) -> None:
    del wait
    # As for the data iterator's workers: see `remote_iterator`.
    vars(agent).clear()
    gc.collect()
