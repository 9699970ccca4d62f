"""Long files first, compiled programs shared by all processes, and dropped before one holds too many of them.

Linux gives a process 65,530 memory maps. Every program takes some, and XLA's CPU compiler crashes where no more can be
had: a worker that has run most of the files got there.
"""

import os
import tempfile
from pathlib import Path

import jax
import pytest

# Compiling is most of what the suite does. Workers and the programs that tests start find what another one compiled.
CACHE = "JAX_COMPILATION_CACHE_DIR"
CACHED = {"jax_persistent_cache_min_compile_time_secs": 0.1, "jax_persistent_cache_min_entry_size_bytes": -1}

# A minute or more each: a worker that begins one last leaves the other idle
LONG = ("zero_gap_test", "engine_test", "routing_test", "rollout_test", "routes_test", "precision_test", "resume_test",
        "paper_test", "experiments_test", "forced_gap_test", "guards_test", "train_test", "reference_test")  # fmt: skip

MAPS = Path("/proc/self/maps")
MANY = 30_000


def pytest_configure(config):
    config.addinivalue_line("markers", "quick: a file whose programs, children's too, are compiled with quick.OPTIONS")
    if CACHE not in os.environ:  # else this is a worker, or the user has one
        folder = tempfile.TemporaryDirectory(prefix="jax-cache-")
        config.add_cleanup(folder.cleanup)
        os.environ |= {CACHE: folder.name} | {name.upper(): str(value) for name, value in CACHED.items()}
    for name, value in (CACHED | {CACHE.lower(): os.environ[CACHE]}).items():
        jax.config.update(name, value)


def pytest_collection_modifyitems(items):
    def order(item):
        long = LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG)
        return item.get_closest_marker("quick") is not None, long  # between the two kinds programs are dropped

    items.sort(key=order)


@pytest.fixture(scope="module", autouse=True)
def _programs(request):
    from tests import quick  # only here: it starts JAX's backend, which pytest-xdist's main process does without

    quick.switch(request.node.get_closest_marker("quick") is not None)
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) >= MANY:
        quick.forget_programs()


@pytest.fixture
def quick():
    """For a test of a file that is not compiled quickly."""
    from tests.quick import switch

    switch(True)
    yield
    switch(False)
