"""Files that many tests of the data read."""

import pytest

from tests import formats


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The documents of `tests.formats` in every format, by the format's name."""
    directory = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield {name: formats.write(directory, name) for name in formats.FORMATS}
