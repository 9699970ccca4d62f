"""Who may import whom: walks the imports of every module. Also a script: `python tests/architecture_test.py`.

Direction: pallas_kernels <- quads_jax.quant <- precision <- ops <- models <- rl <- programs <- step <- train <-
experiments <- launch.py.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("launch.py", "pallas_kernels", "quads_jax", "experiments")

_OPERANDS = ("quads_jax.quant", "quads_jax.precision", "quads_jax.implementations", "pallas_kernels")
_LEFT_OF_MODELS = ("quads_jax.quant", "quads_jax.precision", "quads_jax.ops")
_LEFT_OF_RL = (
    *_LEFT_OF_MODELS, "quads_jax.models", "quads_jax.pack", "quads_jax.checkpoint_layouts",
    "quads_jax.checkpoint_formats")  # fmt: skip

# What of the project a module may import; the longest matching key decides, and its own package is always allowed.
ALLOWED = {
    "pallas_kernels": (),
    "quads_jax": (),
    "quads_jax.quant": ("pallas_kernels.storage",),
    "quads_jax.precision": ("quads_jax.quant",),
    "quads_jax.attention": ("quads_jax.device", "pallas_kernels"),
    "quads_jax.implementations": ("quads_jax.device", "quads_jax.quant", "pallas_kernels"),
    "quads_jax.operands": _OPERANDS,
    "quads_jax.packed_ops": (*_OPERANDS, "quads_jax.operands"),
    "quads_jax.ops": (*_OPERANDS, "quads_jax.operands", "quads_jax.packed_ops"),
    "quads_jax.models": ("quads_jax.precision", "quads_jax.ops", "quads_jax.attention"),
    "quads_jax.pack": (*_LEFT_OF_MODELS, "quads_jax.models"),
    "quads_jax.checkpoint_layouts": ("quads_jax.quant", "quads_jax.models"),
    "quads_jax.checkpoint_formats": (
        *_LEFT_OF_MODELS, "quads_jax.models", "quads_jax.pack", "quads_jax.checkpoint_layouts"),
    "quads_jax.rl": _LEFT_OF_RL,
    "quads_jax.rl.losses": (),
    "quads_jax.rl.advantage": (),
    "quads_jax.rl.corrections": ("quads_jax.rl.losses",),
    "quads_jax.rl.kl": ("quads_jax.rl.losses",),
    "quads_jax.rl.shaping": (),
    "quads_jax.tasks": ("quads_jax.config_tree",),
    **{f"quads_jax.tasks.{name}": () for name in ("worker_process", "math_answers", "hf_encoding")},  # run as files
    "quads_jax.config_tree": (),
    "quads_jax.events": (),
    "quads_jax.metrics": ("quads_jax.config_tree", "quads_jax.events"),
    "quads_jax.plots": (),
    "quads_jax.results": ("quads_jax.config_tree", "quads_jax.metrics"),
    "quads_jax.report": ("quads_jax.plots", "quads_jax.results"),
    "quads_jax.sweep_results": ("quads_jax.metrics", "quads_jax.results"),
    "quads_jax.comparison_plots": ("quads_jax.plots", "quads_jax.results", "quads_jax.sweep_results"),
    "quads_jax.comparison": ("quads_jax.results", "quads_jax.sweep_results", "quads_jax.comparison_plots"),
    "quads_jax.device": (),
    "quads_jax.importing": _LEFT_OF_RL,
    "quads_jax.checkpoints": (
        "quads_jax.config_tree", "quads_jax.models", "quads_jax.pack", "quads_jax.checkpoint_layouts",
        "quads_jax.importing", "quads_jax.rl"),
    "quads_jax.config": (
        "quads_jax.precision", "quads_jax.implementations", "quads_jax.quant", "quads_jax.models", "quads_jax.rl",
        "quads_jax.tasks", "quads_jax.config_tree"),
    "quads_jax.config_checks": (
        "quads_jax.precision", "quads_jax.models", "quads_jax.rl", "quads_jax.config_tree", "quads_jax.config"),
    "quads_jax.supervised": ("quads_jax",),  # the warm start, beside train and after it
    "quads_jax.evaluation": ("quads_jax",),  # likewise
    "quads_jax.generation": ("quads_jax",),  # likewise
    "quads_jax.random_weights": (*_LEFT_OF_RL, "quads_jax.rl"),
    "quads_jax.inspection": ("quads_jax",),  # likewise
    "quads_jax.exporting": ("quads_jax",),  # likewise
    "quads_jax.layer_errors": ("quads_jax",),  # likewise, before train
    "quads_jax.gaps": (
        "quads_jax.precision", "quads_jax.models", "quads_jax.rl", "quads_jax.programs", "quads_jax.step"),
    "quads_jax.programs": ("quads_jax.precision", "quads_jax.models", "quads_jax.pack", "quads_jax.rl"),
    "quads_jax.zero_gap": ("quads_jax.precision", "quads_jax.models", "quads_jax.rl", "quads_jax.programs"),
    "quads_jax.step": (
        "quads_jax.precision", "quads_jax.models", "quads_jax.pack", "quads_jax.rl", "quads_jax.tasks",
        "quads_jax.config", "quads_jax.config_checks", "quads_jax.device", "quads_jax.programs", "quads_jax.sync",
        "quads_jax.zero_gap"),
    "quads_jax.sync": ("quads_jax.precision", "quads_jax.models", "quads_jax.rl", "quads_jax.programs"),
    "quads_jax.start": (
        "quads_jax.config_tree", "quads_jax.models", "quads_jax.config", "quads_jax.checkpoints", "quads_jax.step"),
    "quads_jax.guards": (
        "quads_jax.precision", "quads_jax.models", "quads_jax.pack", "quads_jax.rl", "quads_jax.config_tree",
        "quads_jax.config", "quads_jax.checkpoints", "quads_jax.programs", "quads_jax.step"),
    "quads_jax.train": ("quads_jax",),
    "quads_jax.testing": ("quads_jax.quant", "pallas_kernels.storage"),
    "experiments": ("quads_jax",),
    "experiments.quantizer_speed": ("quads_jax", "experiments", "pallas_kernels"),  # a kernel's speed, beside XLA's
    "launch": ("quads_jax", "experiments"),
}
# These import what ALLOWED says, the standard library and
ARRAY_MATHS = tuple(f"quads_jax.rl.{name}" for name in ("losses", "advantage", "corrections", "kl", "shaping"))
ARRAY_MATHS_IMPORTS = {"jax", "chex"}
FLAG_READERS = ("experiments", "launch")
LAZY_ONLY = {"jax_triton", "triton", "math_verify", "sympy", "jinja2", "tokenizers", "torch", "transformers"}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def module_name(path: Path) -> str:
    """Dotted name of a source file given relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, package: str) -> list[tuple[int, str, bool]]:
    """(line, dotted name, at import time) of everything a module imports; `package` resolves relative imports."""
    found = []

    def visit(node: ast.AST, top_level: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name, top_level) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            found.extend((node.lineno, f"{base}.{alias.name}", top_level) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, top_level and not inside)

    visit(ast.parse(source), True)
    return found


def violations(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the root), a line each."""
    module = module_name(path)
    rule = max((key for key in ALLOWED if within(module, key)), key=len, default=None)
    if rule is None or (rule == "quads_jax" and module != "quads_jax"):
        return [f"{path}: {module} has no place in the import direction: add it to ALLOWED in architecture_test.py"]
    own = rule if rule not in ARRAY_MATHS and rule != "quads_jax" else module
    problems = []
    for line, name, at_import in imports(source, module if path.stem == "__init__" else module.rpartition(".")[0]):
        top = name.partition(".")[0]
        internal = top in ("pallas_kernels", "quads_jax", "experiments", "launch", "tests")
        if internal and not any(within(name, package) for package in (own, *ALLOWED[rule])):
            problems.append(f"{path}:{line}: {module} may not import {name}")
        external = top not in sys.stdlib_module_names and top not in ARRAY_MATHS_IMPORTS
        if module in ARRAY_MATHS and not internal and external:
            problems.append(f"{path}:{line}: {module} may import jax, chex and the standard library, not {name}")
        if within(name, "absl.flags") and not any(within(module, reader) for reader in FLAG_READERS):
            problems.append(f"{path}:{line}: flags are read in experiments and launch.py only")
        if top in LAZY_ONLY and at_import:
            problems.append(f"{path}:{line}: {name} must be imported inside the function that needs it")
    return problems


def source_files() -> list[Path]:
    """All source files, relative to the root: tests may import anything and are left out."""
    roots = [ROOT / name for name in SOURCES]
    files = [file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root]) if file.exists()]
    return sorted(file.relative_to(ROOT) for file in files)


def all_violations() -> list[str]:
    return [problem for file in source_files() for problem in violations(file, (ROOT / file).read_text())]


def test_imports_follow_the_direction():
    assert Path("quads_jax/tasks/base.py") in source_files()
    problems = all_violations()
    assert not problems, "\n".join(problems)


def test_no_python_file_lies_outside_the_layout():
    stray = [file.name for file in ROOT.glob("*.py") if file.name not in (*SOURCES, "conftest.py")]
    assert not stray, stray


# (file, source, a part of the one complaint it must raise; None where it must pass)
CASES = [
    ("pallas_kernels/fp4_gemm/bench.py", "from quads_jax import quant", "may not import quads_jax.quant"),
    ("pallas_kernels/fp4_gemm/mosaic_gpu.py", "from pallas_kernels import compat", None),
    ("quads_jax/quant/tensor.py", "from pallas_kernels.storage import pack_nibbles", None),
    ("quads_jax/quant/tensor.py", "from pallas_kernels.fp4_gemm import reference", "may not import"),
    ("quads_jax/quant/tensor.py", "import quads_jax.precision as p", "may not import quads_jax.precision"),
    ("quads_jax/precision.py", "from quads_jax.quant.formats import NVFP4", None),
    ("quads_jax/ops.py", "from pallas_kernels.fp4_gemm import reference", None),
    ("quads_jax/ops.py", "from quads_jax.models import decoder", "may not import quads_jax.models.decoder"),
    ("quads_jax/models/decoder.py", "from quads_jax import ops, precision", None),
    ("quads_jax/models/decoder.py", "from ..quant import tensor", "may not import quads_jax.quant.tensor"),
    ("quads_jax/models/__init__.py", "from .decoder import Decoder", None),
    ("quads_jax/models/__init__.py", "from ..pack import pack", "may not import quads_jax.pack.pack"),
    ("quads_jax/models/moe.py", "def f():\n  from pallas_kernels import storage", "may not import pallas_kernels"),
    ("quads_jax/pack.py", "from quads_jax.quant import tensor", None),
    ("quads_jax/rl/update.py", "from quads_jax.rl import losses\nfrom quads_jax.models import decoder", None),
    ("quads_jax/rl/update.py", "from quads_jax import train", "may not import quads_jax.train"),
    ("quads_jax/rl/losses.py", "from __future__ import annotations\nimport math, chex\nfrom jax import lax", None),
    ("quads_jax/rl/losses.py", "import numpy as np", "jax, chex and the standard library"),
    ("quads_jax/rl/losses.py", "from quads_jax.rl import types", "may not import quads_jax.rl.types"),
    ("quads_jax/rl/kl.py", "from quads_jax.rl.losses import masked_mean", None),
    ("quads_jax/rl/kl.py", "from quads_jax.rl import types", "may not import quads_jax.rl.types"),
    ("quads_jax/tasks/chain_sum.py", "from quads_jax.rl import types", "may not import quads_jax.rl.types"),
    ("quads_jax/config.py", "from quads_jax.tasks import TASKS", None),
    ("quads_jax/config.py", "from quads_jax import train", "may not import quads_jax.train"),
    ("quads_jax/programs.py", "from quads_jax.rl.update import update", None),
    ("quads_jax/programs.py", "from quads_jax import step", "may not import quads_jax.step"),
    ("quads_jax/step.py", "from quads_jax import guards", "may not import quads_jax.guards"),
    ("quads_jax/guards.py", "from quads_jax import step, programs", None),
    ("quads_jax/guards.py", "from quads_jax import train", "may not import quads_jax.train"),
    ("quads_jax/device.py", "from quads_jax import config", "may not import quads_jax.config"),
    ("quads_jax/train.py", "from quads_jax import config, metrics, pack, rl", None),
    ("quads_jax/train.py", "from experiments import warm_start", "may not import experiments.warm_start"),
    ("quads_jax/train.py", "from absl import app, flags", "flags are read in"),
    ("quads_jax/train.py", "from absl.flags import FLAGS", "flags are read in"),
    ("quads_jax/train.py", "from absl import logging", None),
    ("experiments/warm_start.py", "from absl import flags\nfrom quads_jax import train", None),
    ("experiments/warm_start.py", "import launch", "may not import launch"),
    ("launch.py", "from absl import flags\nfrom experiments import warm_start", None),
    ("quads_jax/quant/triton.py", "def f():\n  import jax_triton as jt", None),
    ("quads_jax/quant/triton.py", "try:\n  import triton.language\nexcept ImportError: pass", "inside the function"),
    ("pallas_kernels/q/triton.py", "class A:\n  import jax_triton", "inside the function"),
    ("quads_jax/tasks/math_answers.py", "def load():\n  import math_verify", None),
    ("quads_jax/tasks/math_answers.py", "import math_verify", "inside the function"),
    ("quads_jax/tasks/worker_process.py", "from quads_jax.tasks import base", "may not import quads_jax.tasks.base"),
    ("quads_jax/helpers.py", "", "no place in the import direction"),
    ("quads_jax/tasks/chain_sum.py", "from tests import contract", "may not import tests.contract"),
]


def test_synthetic_modules_are_judged_right():
    for file, source, complaint in CASES:
        problems = violations(Path(file), source)
        if complaint is None:
            assert not problems, (file, source, problems)
        else:
            assert len(problems) == 1 and complaint in problems[0], (file, source, problems)


if __name__ == "__main__":
    found = all_violations()
    print("\n".join(found) or f"import direction holds in {len(source_files())} modules")
    sys.exit(bool(found))
