"""Problems that a verification finds in a step, for people and programs."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["damaged", "diverged", "incomplete", "manifest", "orbax", "unverifiable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of a step.

    Attributes:
      kind: `damaged`, a copy is not what was saved; `diverged`, holders saved different
        values; `incomplete`, no holder has a part; `manifest`, a manifest cannot be
        read; `orbax`, the values exist but Orbax cannot load them; `unverifiable`,
        there are no digests.
      step: its number.
      save: which save of it; empty where that is not known.
      part: a leaf and box, or a file; empty if it is the step as a whole.
      tier: of the holder, `local` or `persistent`; empty if it is not about one.
      holder: the id of the host whose manifest it is; empty likewise.
      path: of the bad file, or of the step.
      why: what is wrong.
      remedy: what to do.
    """

    kind: Kind
    step: int
    save: str = ""
    part: str = ""
    tier: str = ""
    holder: str = ""
    path: str = ""
    why: str
    remedy: str

    def __str__(self) -> str:
        subject = f"step {self.step}"
        if self.part:
            subject += f", {self.part}"
        if self.holder:
            subject += f", {self.tier} tier, host {self.holder}"
        location = f" ({self.path})" if self.path else ""
        return f"{subject}{location}: {self.why}; {self.remedy}"
