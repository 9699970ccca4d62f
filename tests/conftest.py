"""Long files first, and compiled programs are dropped before a process holds too many of them.

Linux gives a process 65,530 memory maps. Every program takes some, and XLA's CPU compiler crashes where no more can be
had: a worker that has run most of the files got there.
"""

import gc
import sys
from pathlib import Path

import jax
import pytest

# A minute or more each: a worker that begins one last leaves the other idle
LONG = ("zero_gap_test", "routes_test", "resume_test", "paper_test", "reference_test", "engine_test", "routing_test")

MAPS = Path("/proc/self/maps")
MANY = 30_000


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    yield
    if not MAPS.exists() or len(MAPS.read_bytes().splitlines()) < MANY:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("quads_jax"):  # whose caches hold programs that refuse to be traced again
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()
