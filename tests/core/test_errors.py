import importlib
import itertools
import pickle
import pkgutil

import elastic_ckpt
from elastic_ckpt.core import errors
from elastic_ckpt.elastic import failures


def test_a_message_names_the_first_five():
    assert errors.first_of([]) == ""
    assert errors.first_of(map(str, range(5))) == "0, 1, 2, 3, 4"
    assert errors.first_of(map(str, itertools.count())) == "0, 1, 2, 3, 4, ..."


def subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def import_all(package):
    """Imports all modules of a package but those that need an extra."""
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not each.name.endswith("__main__"):
            try:
                importlib.import_module(each.name)
            except ImportError:
                continue


def test_each_error_arrives_in_another_process_as_it_is():
    import_all(elastic_ckpt)
    killed = failures.silent_death(2, -9)
    made = {
        errors.HostsFailedError: errors.HostsFailedError({3: "its disk is full"}),
        failures.WorldLostError: failures.WorldLostError([killed]),
        failures.ProgramFailedError: failures.ProgramFailedError(
            "host 2 failed: ValueError", failures=[killed]
        ),
    }
    kinds = set(subclasses(errors.ElasticCkptError))
    assert set(made) <= kinds
    for kind in kinds:
        error = made[kind] if kind in made else kind("what, where, and what to do")
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)
