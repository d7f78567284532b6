"""An executable of an earlier world is loaded if it fits and this run made it."""

import dataclasses
import importlib
import os
import pathlib
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import topology
from elastic_ckpt.elastic import executables

pytestmark = pytest.mark.usefixtures("without_jax_cache")

COMPILED = ["compile_started", "compiled"]
LOADED = ["executable_loaded"]


@pytest.fixture
def kept():
    with executables.kept() as kept:
        yield kept
    assert not os.path.exists(kept.directory)


def sharded(num_devices=4, rows=8):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.device_put(np.arange(rows, dtype=np.float32), sharding)


def run(kept, *, scale=3.0, num_devices=4, rows=8, texts=(), keeper=None):
    """Runs a new jitted function, as a new world does; returns its events."""
    x, names = sharded(num_devices, rows), []

    @jax.jit
    def step(x):
        assert isinstance(texts, tuple)
        return jnp.cumsum(x * scale), (x * x).sum()

    keeper = keeper or executables.Executables(kept)
    compiled = keeper.compiled(
        step, x, step=1, emit=lambda name, **_: names.append(name)
    )
    expected = executables.compile_now(step, x)(x)
    jax.tree.map(np.testing.assert_array_equal, compiled(x), expected)
    return names


def files(kept):
    return sorted(
        path for path in pathlib.Path(kept.directory).iterdir() if len(path.name) == 65
    )


def test_what_was_compiled_is_loaded_and_has_the_same_bits(kept, tmp_path, monkeypatch):
    assert run(kept) == COMPILED
    assert run(kept) == LOADED
    (file,) = files(kept)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    text, again = ("".join(["a", "long", "text"]) for _ in range(2))
    assert text is not again
    # Another program, mesh or argument is compiled.
    for change in (
        *({"scale": 4.0}, {"num_devices": 2}, {"rows": 16}),
        *({"texts": (text, text)}, {"texts": (text, "another")}),
    ):
        assert run(kept, **change) == COMPILED
    # Texts may be one object, or equal.
    assert run(kept, texts=(text, again)) == LOADED
    # A module that changes before it is imported is another program.
    (tmp_path / "imported_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_late")
    assert run(kept) == COMPILED
    # What is imported is not read again.
    (tmp_path / "imported_late.py").write_text("# changed")
    assert run(kept) == LOADED


def test_a_world_loads_what_is_kept_before_it_asks_or_changes_a_setting(kept):
    before = jax.config.jax_default_prng_impl
    try:
        for setting in (before, "unsafe_rbg"):
            jax.config.update("jax_default_prng_impl", setting)
            assert run(kept) == COMPILED
        jax.config.update("jax_default_prng_impl", before)
        keeper = executables.Executables(kept)
        for loading in keeper._begun.result().values():
            assert loading.result() is not None
        with mock.patch.object(executables.pickle, "loads") as unpickled:
            assert run(kept, keeper=keeper) == LOADED
            assert run(kept, scale=4.0, keeper=keeper) == COMPILED
            jax.config.update("jax_default_prng_impl", "unsafe_rbg")
            assert run(kept, keeper=keeper) == LOADED
        unpickled.assert_not_called()
    finally:
        jax.config.update("jax_default_prng_impl", before)


def test_a_spoilt_executable_is_refused_and_compiled_anew(kept):
    run(kept)
    (file,) = files(kept)
    run(kept, scale=4.0)
    (other,) = {*files(kept)} - {file}
    spoilt = [bytearray(file.read_bytes()) for _ in range(3)]
    for content, at in zip(spoilt, (0, 40, -1), strict=True):
        content[at] ^= 1
    # Under the name of another one; and that of another run.
    contents = [(kept, each) for each in (*spoilt, other.read_bytes())]
    contents += [(dataclasses.replace(kept, key=bytes(32)), file.read_bytes())]
    other.unlink()
    for of, content in contents:
        file.write_bytes(content)
        with mock.patch.object(executables.pickle, "loads") as unpickled:
            assert run(of) == ["executable_refused", *COMPILED]
        unpickled.assert_not_called()
        assert run(of) == LOADED


def test_an_executable_of_jaxs_cache_is_not_kept_unless_only_a_constant_is_there(
    kept, tmp_path
):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    # XLA serializes it without its code on CPU.
    run(kept)
    (file,) = files(kept)
    file.unlink()
    jax.clear_caches()
    assert run(kept) == COMPILED
    assert files(kept) == []

    def constant():
        with jax.ensure_compile_time_eval():
            return jnp.cumsum(jnp.arange(5.0))

    constant()
    jax.clear_caches()
    with executables._cache_hits() as hits:
        # What another thread finds there does not count.
        hit = (executables._CACHE_HIT,)
        thread = threading.Thread(target=jax.monitoring.record_event, args=hit)
        thread.start()
        thread.join()
        assert not hits
        step = jax.jit(lambda x: x + constant().sum())
        executables.Executables(kept).compiled(step, sharded())
    assert hits
    assert files(kept)


@pytest.mark.parametrize(
    ("is_in_loop", "num_hosts", "is_kept"),
    [(True, 2, False), (False, 2, True), (True, 1, True)],
)
def test_on_cpus_of_several_hosts_collectives_in_and_around_a_loop_are_not_kept(
    kept, monkeypatch, is_in_loop, num_hosts, is_kept
):
    # A program that was loaded would have no order between them.
    monkeypatch.setattr(topology, "num_hosts", lambda: num_hosts)
    x = sharded()
    whole = NamedSharding(x.sharding.mesh, PartitionSpec())

    def summed(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x).sum(), whole)

    @jax.jit
    def step(x):
        inner = summed if is_in_loop else jnp.sin
        return summed(x), jax.lax.fori_loop(0, 3, lambda _, y: y + inner(y), x)

    compiled = executables.Executables(kept).compiled(step, x)
    assert "while" in compiled.as_text()
    assert len(files(kept)) == is_kept
