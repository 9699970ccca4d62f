"""Which numbers each layer role computes with: `LayerPrecision`, `Precision`, and the named recipes.

A recipe is a pair of `Precision` values, one for the rollout and one for the trainer. They are static and hashable: the
only thing that a model sees of quantization, besides the leaves of its parameters.
"""

from __future__ import annotations

import dataclasses

from quads_jax.quant.formats import FP8, NVFP4, BlockFormat
from quads_jax.quant.residual import ResidualSpec, check_spec

ROLES = ("experts", "shared", "mlp", "attention", "head")
DEFAULT_ROLES = ("experts", "shared", "mlp", "attention")
DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class LayerPrecision:
    """How one role's GEMMs y = x w^T are computed.

    weight: format of w, or None for the compute dtype. activation: format of x, or None.
    residual: residual activation compensation of x (needs `activation`), or None.
    permuted: the site's channel order is applied to K before w is quantized (policy `static`, and its permute-only
    control).
    """

    weight: BlockFormat | None = None
    activation: BlockFormat | None = None
    residual: ResidualSpec | None = None
    permuted: bool = False

    def __post_init__(self):
        if self.residual is not None:
            check_spec(self.residual)
            if self.activation is None:
                raise ValueError(f"residual={self.residual} has no effect on unquantized activations: set `activation`")

    @property
    def needs_order(self) -> bool:
        """Whether a GEMM of this precision reads the channel order of its input site."""
        spec = self.residual
        measured = spec is not None and spec.ratio > 0 and spec.policy in ("static", "block", "adaptive")
        return self.permuted or measured


@dataclasses.dataclass(frozen=True)
class Precision:
    """One side's arithmetic: a `LayerPrecision` a role, the compute dtype of everything else, and the implementation of
    GEMMs, of a decode step's attention (one of `attention.IMPLEMENTATIONS`) and of its routing, where experts are read
    as they are stored (one of `ops.ROUTING`). None: chosen for the device; a named one runs or raises. Routers are
    float32 always; norms, softmax and log-probs too.
    """

    name: str = "BF16"
    experts: LayerPrecision = LayerPrecision()
    shared: LayerPrecision = LayerPrecision()
    mlp: LayerPrecision = LayerPrecision()
    attention: LayerPrecision = LayerPrecision()
    head: LayerPrecision = LayerPrecision()
    dtype: str = "bfloat16"
    implementation: str | None = None
    decode_attention: str | None = None
    routing: str | None = None

    def role(self, name: str) -> LayerPrecision:
        """The `LayerPrecision` of a role; an unknown role raises with the list."""
        if name not in ROLES:
            raise ValueError(f"unknown layer role {name!r}; roles are {', '.join(ROLES)}")
        return getattr(self, name)

    @property
    def needs_order(self) -> bool:
        """Whether any role reads channel orders, so that calibration must run before the first step."""
        return any(self.role(r).needs_order for r in ROLES)

    @property
    def unpacked(self) -> Precision:
        """The same numbers of f32 masters, which GEMMs that read weights as stored do not take."""
        return dataclasses.replace(self, implementation=None)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A rollout precision and a trainer precision; `label` is what tables and folders call it."""

    label: str
    rollout: Precision
    trainer: Precision


def make_precision(
    name: str, layer: LayerPrecision, roles: tuple[str, ...] = DEFAULT_ROLES, dtype: str = "bfloat16"
) -> Precision:
    """`layer` on the given roles and the compute dtype on the others."""
    if not roles:
        raise ValueError(f"roles is empty: nothing would be quantized; name some of {', '.join(ROLES)}")
    if len(set(roles)) < len(roles):
        raise ValueError(f"roles={','.join(roles)} names a role twice")
    unknown = [r for r in roles if r not in ROLES]
    if unknown:
        raise ValueError(
            f"unknown layer role {unknown[0]!r}; roles are {', '.join(ROLES)} (routers and norms are never quantized)"
        )
    if dtype not in DTYPES:
        raise ValueError(f"compute dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return Precision(name=name, dtype=dtype, **{r: layer for r in roles})


_W4A4 = LayerPrecision(weight=NVFP4, activation=NVFP4)
_W4A16 = LayerPrecision(weight=NVFP4)
_PLAIN = LayerPrecision()

# name -> (rollout, trainer). Those of COMPENSATED are completed by their ResidualSpec in `recipe`.
_SIDES: dict[str, tuple[LayerPrecision, LayerPrecision]] = {
    "BF16": (_PLAIN, _PLAIN),
    "FP8": (LayerPrecision(weight=FP8, activation=FP8), _PLAIN),
    "W4A16": (_W4A16, _PLAIN),
    "W16A4": (LayerPrecision(activation=NVFP4), _PLAIN),
    "NAIVE": (_W4A4, _PLAIN),
    "QAT": (_W4A4, _W4A16),
    "QUADS": (_W4A4, _W4A16),
    "RAC": (_W4A4, _PLAIN),  # QUADS without its training side
    "SYM": (_W4A4, _W4A4),
}
RECIPES = tuple(_SIDES)
COMPENSATED = ("QUADS", "RAC")
DEFAULT_RESIDUAL = ResidualSpec(ratio=0.5, policy="block")


def _side_name(layer: LayerPrecision) -> str:
    if layer == _PLAIN:
        return "BF16"
    if layer.weight == FP8:
        return "FP8"
    name = f"W{4 if layer.weight else 16}A{4 if layer.activation else 16}"
    if layer.residual is not None:
        name += f"+RAC {layer.residual.ratio:g} {layer.residual.policy}"
    return name + (" permuted" if layer.permuted else "")


def recipe(
    name: str,
    *,
    ratio: float | None = None,
    policy: str | None = None,
    roles: tuple[str, ...] = DEFAULT_ROLES,
    dtype: str = "bfloat16",
    rollout_dtype: str | None = None,
) -> Recipe:
    """The named recipe. `ratio` and `policy` (residual compensation of the rollout) belong to COMPENSATED recipes and
    raise elsewhere. `rollout_dtype`: the rollout's compute dtype where it is not the trainer's, as of an engine that
    rounds elsewhere; it appends "-DTYPE-rollout" to the label.
    """
    if rollout_dtype == dtype:
        raise ValueError(f"rollout_dtype={rollout_dtype!r} has no effect: it is the dtype of both sides; leave it out")
    if name not in _SIDES:
        raise ValueError(f"unknown recipe {name!r}; recipes are {', '.join(RECIPES)}")
    rollout, trainer = _SIDES[name]
    label = name
    if name in COMPENSATED:
        spec = ResidualSpec(
            ratio=DEFAULT_RESIDUAL.ratio if ratio is None else ratio,
            policy=DEFAULT_RESIDUAL.policy if policy is None else policy,
        )
        check_spec(spec)
        permuted = spec.policy == "static"
        rollout = dataclasses.replace(rollout, residual=spec, permuted=permuted)
        trainer = dataclasses.replace(trainer, permuted=permuted and trainer != _PLAIN)
        label = f"{name}-{100 * spec.ratio:g}" + ("" if spec.policy == DEFAULT_RESIDUAL.policy else f"-{spec.policy}")
    elif ratio is not None or policy is not None:
        raise ValueError(
            f"ratio={ratio} and policy={policy} have no effect on recipe {name}; leave them out or use recipe "
            f"{' or '.join(COMPENSATED)}"
        )
    if rollout_dtype is not None:
        label += f"-{rollout_dtype}-rollout"
    return Recipe(
        label=label,
        rollout=make_precision(_side_name(rollout), rollout, roles, rollout_dtype or dtype),
        trainer=make_precision(_side_name(trainer), trainer, roles, dtype),
    )
