"""The step that a search finds, and its message where there is none."""

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import find, source
from tests.steps import test_search
from tests.tiers import saved_worlds


class Given:
    """A tier that offers what it was given."""

    def __init__(self, offers):
        self._offers = offers

    def steps(self):
        return sorted({step for step, _ in self.known_saves()})

    def known_saves(self):
        return sorted({(m.step, m.save) for m in (o.manifest for o in self._offers)})

    def offers(self, step):
        of_step = [each for each in self._offers if each.manifest.step == step]
        return source.Offered(sources=dict.fromkeys(of_step), problems=[])


def search(*offers):
    return find.Search([Given(offers)])


def test_what_is_missing_is_named_with_the_step_to_restore_instead():
    four = test_search.four
    lacking = four(step=40)
    lacking[1] = test_search.host_offer(1, step=40, files=[])
    files = lacking[2].manifest.component_files
    lacking[2] = saved_worlds.offer(
        lacking[2].host, test_search.WHOLE, [], step=40, files=files
    )
    with pytest.raises(errors.CheckpointError) as raised:
        search(*four(step=30), *lacking).of_step(40)
    assert str(raised.value) == (
        "step 40 in local lacks parts of 1 of 2 leaves: [params/w[4:6, 0:4]], and lacks"
        " 16 of 64 parts of data/cursors: [16, 17, 18, 19, 20, ...]; newest complete"
        " step is 30; restore it with step=30"
    )


def test_a_step_that_is_nowhere_is_told():
    nowhere = "step 50 has no manifest that can be read"
    with pytest.raises(errors.CheckpointError, match=f"{nowhere}; newest complete"):
        search(*test_search.four()).of_step(50)
    with pytest.raises(errors.CheckpointError, match=f"{nowhere}; no step is complete"):
        search().of_step(50)


def test_the_save_that_is_complete_is_found_not_the_last():
    four = test_search.four
    looking = search(*four(save="1"), *four(save="2")[2:])
    assert looking.of_step(30).step.save == looking.newest().found_step.step.save == "1"
