"""Programs that compile in a fifth of the time, for tests where no bits are compared, or only bits of such programs."""

import contextlib
import gc
import os
import sys

import jax
from jax._src import compiler  # JAX has no public default for the options of `jax.jit`

GPU = jax.default_backend() == "gpu"
# for `jax.jit(compiler_options=...)`: no optimization after XLA's own passes, and the emitters that compile faster then
OPTIONS = {} if GPU else {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}  # fmt: skip


def forget_programs() -> None:
    """Drops all compiled programs, and what of the library refuses to be traced again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("quads_jax"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()


@contextlib.contextmanager
def compilation():
    """Meanwhile this process and those that it starts compile everything with `OPTIONS`."""
    original, flags = compiler.get_compile_options, os.environ.get("XLA_FLAGS")

    def quick(*args, env_options_overrides=None, **options):
        return original(*args, env_options_overrides=OPTIONS | (env_options_overrides or {}), **options)

    jax.jit(lambda: 0)()  # XLA reads the flags once: after this those of below are for other processes
    forget_programs()
    compiler.get_compile_options = quick
    os.environ["XLA_FLAGS"] = " ".join([flags or "", *(f"--{k}={str(v).lower()}" for k, v in OPTIONS.items())])
    try:
        yield
    finally:
        compiler.get_compile_options = original
        del os.environ["XLA_FLAGS"]
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags
        forget_programs()
