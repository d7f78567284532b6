"""Mistakes written by hand, each of which would cost a user something."""

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Fault:
    """One mistake in one module.

    Attributes:
      name: What goes wrong.
      path: The module's, from the project's root.
      code: What stands there, once.
      mistake: What stands there with the mistake.
      tests: Files or directories of default tests of which one has to fail.
    """

    name: str
    path: str
    code: str
    mistake: str
    tests: tuple[str, ...]

    def applied(self) -> str:
        """The module's source with the mistake in it."""
        source = pathlib.Path(self.path).read_text()
        if source.count(self.code) != 1:
            raise ValueError(f"{self.path} has {self.code!r} not exactly once")
        return source.replace(self.code, self.mistake)


FAULTS: tuple[Fault, ...] = ()
