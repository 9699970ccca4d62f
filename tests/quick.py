"""Programs that compile in a third of the time, for tests where no bits are compared, or only bits of such programs."""

import gc
import os
import sys

import jax
from jax._src import compiler  # JAX has no public default for the options of `jax.jit`

GPU = jax.default_backend() == "gpu"
# for `jax.jit(compiler_options=...)`: no optimization after XLA's own passes
OPTIONS = {} if GPU else {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}  # fmt: skip
if not GPU and jax.__version_info__ < (0, 11):  # the emitters of before compile faster; later versions have no others
    OPTIONS["xla_cpu_use_fusion_emitters"] = False


def forget_programs() -> None:
    """Drops all compiled programs, and what of the library refuses to be traced again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("quads_jax"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()


def switch(on: bool) -> None:
    """From here on this process, and those that it starts, compile everything with `OPTIONS`, or as usual again."""
    if on == (compiler.get_compile_options is not _usual):
        return
    jax.jit(lambda: 0)()  # XLA reads its flags once: after this those of below are for other processes
    forget_programs()
    compiler.get_compile_options = _quick if on else _usual
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in _FLAGS]
    os.environ["XLA_FLAGS"] = " ".join(given + _FLAGS * on)


_usual = compiler.get_compile_options
_FLAGS = [f"--{name}={str(value).lower()}" for name, value in OPTIONS.items()]


def _quick(*args, env_options_overrides=None, **options):
    return _usual(*args, env_options_overrides=OPTIONS | (env_options_overrides or {}), **options)
