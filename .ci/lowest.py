"""Prints what pyproject.toml requires, all extras and the group `dev` included.

uv has a lowest version only of what it is asked for by name, and the project's own
[tool.uv] pins all of it: so it is asked for this list, in another directory.
"""

import itertools
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parent.parent


def main() -> None:
    """Prints a requirement a line."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    extras = itertools.chain(*project["optional-dependencies"].values())
    dev = pyproject["dependency-groups"]["dev"]
    for each in (*project["dependencies"], *extras, *dev):
        if not each.startswith(project["name"]):
            print(each)


if __name__ == "__main__":
    main()
