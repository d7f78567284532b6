"""The data of a run that goes back to a step, and continues with the rows after it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from etils import epath


@dataclasses.dataclass(frozen=True)
class LeavingOut:
    """A component that is loaded in place of the data, whose position does not change.

    Attributes:
      leave_out: receives the directory of the data state of a step, or None for the
        beginning, and notes that all rows since then are left out; see
        `HostIterator.leave_out`.
    """

    leave_out: Callable[[epath.Path | None], object]

    async def save(self, directory: Any) -> Awaitable[None]:
        """Is not called: the data itself is saved."""
        raise NotImplementedError

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Notes the rows."""
        await asyncio.to_thread(self.leave_out, directory)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done
