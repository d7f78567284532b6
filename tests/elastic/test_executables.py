"""An executable of an earlier world is loaded if it fits and this run made it."""

import dataclasses
import importlib
import os
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import topology
from elastic_ckpt.elastic import executables

pytestmark = pytest.mark.usefixtures("without_jax_cache")

ROWS = 8
# What was unpickled although it was altered, or loaded before.
UNPICKLED = []


class Events:
    def __init__(self):
        self.names = []

    def __call__(self, name, **_):
        self.names.append(name)


@pytest.fixture
def kept():
    UNPICKLED.clear()
    with executables.kept() as kept:
        yield kept
    assert not os.path.exists(kept.directory)
    assert not UNPICKLED


def arguments(num_devices=4, rows=ROWS):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.device_put(np.arange(rows, dtype=np.float32), sharding)


def step_of(scale):
    @jax.jit
    def step(x):
        return jnp.cumsum(x * scale), (x * x).sum()

    return step


def run(kept, *, scale=3.0, num_devices=4, rows=ROWS, keeper=None):
    """Runs a new jitted function, as a new world does; returns results and events."""
    emit = Events()
    x = arguments(num_devices, rows)
    keeper = keeper or executables.Executables(kept)
    compiled = keeper.compiled(step_of(scale), x, step=1, emit=emit)
    return [np.asarray(each) for each in compiled(x)], emit.names


def files(kept):
    return sorted(
        path for path in pathlib.Path(kept.directory).iterdir() if len(path.name) == 65
    )


COMPILED = ["compile_started", "compiled"]
LOADED = ["executable_loaded"]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_was_compiled_is_loaded_and_has_the_same_bits(kept):
    first, names = run(kept)
    assert names == COMPILED
    second, names = run(kept)
    assert names == LOADED
    assert_same(first, second)
    (file,) = files(kept)
    assert file.stat().st_mode & 0o777 == 0o600
    assert pathlib.Path(kept.directory).stat().st_mode & 0o777 == 0o700


def preloading(kept):
    """What a new world has, once it has loaded the executables in the background."""
    keeper = executables.Executables(kept)
    for loading in keeper._begun.result().values():
        assert loading.result() is not None
    return keeper


def test_a_world_loads_what_is_kept_before_it_asks(kept, monkeypatch):
    first, _ = run(kept)
    keeper = preloading(kept)
    # From here on nothing is loaded.
    monkeypatch.setattr(executables.pickle, "loads", refuse_to_unpickle)
    second, names = run(kept, keeper=keeper)
    assert names == LOADED
    assert_same(first, second)
    assert run(kept, scale=4.0, keeper=keeper)[1] == COMPILED


def test_what_is_kept_under_a_setting_is_loaded_before_the_program_makes_it(
    kept, monkeypatch
):
    before = jax.config.jax_default_prng_impl
    try:
        for setting in (before, "unsafe_rbg"):
            jax.config.update("jax_default_prng_impl", setting)
            assert run(kept)[1] == COMPILED
        jax.config.update("jax_default_prng_impl", before)
        keeper = preloading(kept)
        monkeypatch.setattr(executables.pickle, "loads", refuse_to_unpickle)
        jax.config.update("jax_default_prng_impl", "unsafe_rbg")
        assert run(kept, keeper=keeper)[1] == LOADED
    finally:
        jax.config.update("jax_default_prng_impl", before)


def test_a_module_that_changes_before_it_is_imported_is_another_program(
    kept, tmp_path, monkeypatch
):
    run(kept)
    (tmp_path / "imported_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_late")
    assert run(kept)[1] == COMPILED
    # What is imported is not read again.
    (tmp_path / "imported_late.py").write_text("# changed")
    assert run(kept)[1] == LOADED


@pytest.mark.parametrize("change", [{"scale": 4.0}, {"num_devices": 2}, {"rows": 16}])
def test_another_program_mesh_or_argument_is_compiled(kept, change):
    run(kept)
    results, names = run(kept, **change)
    assert names == COMPILED
    compiled = executables.compile_now(
        step_of(change.get("scale", 3.0)),
        x := arguments(change.get("num_devices", 4), change.get("rows", ROWS)),
    )
    assert_same(results, map(np.asarray, compiled(x)))


@pytest.mark.parametrize("at", [0, 40, -1])
def test_an_altered_executable_is_refused_and_compiled_anew(kept, at, monkeypatch):
    first, _ = run(kept)
    (file,) = files(kept)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr(executables.pickle, "loads", refuse_to_unpickle)
    second, names = run(kept)
    assert names == ["executable_refused", *COMPILED]
    assert_same(first, second)
    monkeypatch.undo()
    assert run(kept)[1] == LOADED


def refuse_to_unpickle(content):
    UNPICKLED.append(content)
    raise AssertionError("an altered executable was unpickled")


def test_an_executable_of_another_run_is_refused(kept, monkeypatch):
    run(kept)
    other = dataclasses.replace(kept, key=bytes(32))
    with monkeypatch.context() as patched:
        patched.setattr(executables.pickle, "loads", refuse_to_unpickle)
        assert run(other)[1] == ["executable_refused", *COMPILED]
    assert run(other)[1] == LOADED


def test_an_executable_under_the_name_of_another_is_refused(kept, monkeypatch):
    run(kept)
    (first,) = files(kept)
    run(kept, scale=4.0)
    (second,) = set(files(kept)) - {first}
    first.rename(second)
    monkeypatch.setattr(executables.pickle, "loads", refuse_to_unpickle)
    assert run(kept, scale=4.0)[1] == ["executable_refused", *COMPILED]


@pytest.fixture
def jax_cache(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("without_jax_cache", "jax_cache")
def test_an_executable_of_jaxs_cache_is_not_kept(kept):
    # XLA serializes it without its code on CPU.
    first, _ = run(kept)
    (file,) = files(kept)
    file.unlink()
    jax.clear_caches()
    for _ in range(2):
        again, names = run(kept)
        assert names == COMPILED
        assert files(kept) == []
        assert_same(first, again)
        jax.clear_caches()


@pytest.mark.usefixtures("without_jax_cache", "jax_cache")
def test_an_executable_is_kept_though_a_constant_of_it_is_in_jaxs_cache(kept):
    def constant():
        with jax.ensure_compile_time_eval():
            return jnp.cumsum(jnp.arange(5.0))

    constant()
    jax.clear_caches()
    with executables._cache_hits() as hits:
        x = arguments()
        step = jax.jit(lambda x: x + constant().sum())
        executables.Executables(kept).compiled(step, x)
    assert hits
    assert files(kept)


def test_what_another_thread_finds_in_jaxs_cache_does_not_count():
    with executables._cache_hits() as hits:
        thread = threading.Thread(
            target=jax.monitoring.record_event, args=(executables._CACHE_HIT,)
        )
        thread.start()
        thread.join()
        assert not hits
        jax.monitoring.record_event(executables._CACHE_HIT)
        assert hits


@pytest.mark.parametrize(
    ("is_in_loop", "num_hosts", "is_kept"),
    [(True, 2, False), (False, 2, True), (True, 1, True)],
)
def test_on_cpus_of_several_hosts_collectives_in_and_around_a_loop_are_not_kept(
    kept, monkeypatch, is_in_loop, num_hosts, is_kept
):
    # A program that was loaded would have no order between them.
    monkeypatch.setattr(topology, "num_hosts", lambda: num_hosts)
    x = arguments()
    whole = NamedSharding(x.sharding.mesh, PartitionSpec())

    def summed(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x).sum(), whole)

    @jax.jit
    def step(x):
        y = x
        if is_in_loop:
            y = jax.lax.fori_loop(0, 3, lambda _, y: y + summed(y), x)
        return summed(x), y

    compiled = executables.Executables(kept).compiled(step, x)
    assert ("while" in compiled.as_text()) == is_in_loop
    assert len(files(kept)) == is_kept


def test_a_function_has_one_name_whether_its_texts_are_one_object_or_equal():
    def closed_over(*texts):
        return lambda: texts

    text = "".join(["a", "long", "text"])
    again = "".join(["a", "long", "text"])
    assert text is not again
    same = executables._digest(closed_over(text, text))
    assert executables._digest(closed_over(text, again)) == same
    assert executables._digest(closed_over(text, "another")) != same
