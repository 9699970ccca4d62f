"""Number formats as frozen values. Code branches on their fields, never on a name; a new format is one value here."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ElementFormat:
    """A sign-magnitude minifloat without infinities: steps of 2**(max(exponent, min_exponent) - mantissa_bits)."""

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """How a tensor is scaled: value = element * block scale * global scale.

    block: elements along K that share a scale of format `scale`; None (with scale None) means no block scales.
    has_global: an f32 scale per scaled unit (token, expert or tensor) on top.
    """

    name: str
    element: ElementFormat
    block: int | None
    scale: ElementFormat | None
    has_global: bool

    @property
    def largest(self) -> float:
        """Largest element times largest block scale: what a unit's amax is mapped to (2688 for NVFP4, 448 for FP8)."""
        return self.element.max * (1.0 if self.scale is None else self.scale.max)


E2M1 = ElementFormat("e2m1", bits=4, mantissa_bits=1, min_exponent=0, max=6.0)
E4M3 = ElementFormat("e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max=448.0)

NVFP4 = BlockFormat("nvfp4", E2M1, block=16, scale=E4M3, has_global=True)
FP8 = BlockFormat("fp8", E4M3, block=None, scale=None, has_global=True)

FORMATS = {fmt.name: fmt for fmt in (NVFP4, FP8)}
