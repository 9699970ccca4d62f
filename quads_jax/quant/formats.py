"""Number formats as frozen values. Code branches on their fields, never on a name; a new format is one value here."""

import dataclasses

SCALE_RULES = ("floor", "rceil", "even")  # see rounding.power_of_two_scale
CHOICES = ("squared", "absolute")
_BF16_SIGNIFICANT_BITS = 8


@dataclasses.dataclass(frozen=True)
class ElementFormat:
    """A sign-magnitude minifloat without infinities: steps of 2**(max(exponent, min_exponent) - mantissa_bits).

    E8M0 has neither sign nor zero: powers of two, for scales only. F32, for scales only too, is float32 itself.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float


E2M1 = ElementFormat("e2m1", bits=4, mantissa_bits=1, min_exponent=0, max=6.0)
E4M3 = ElementFormat("e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max=448.0)
E8M0 = ElementFormat("e8m0", bits=8, mantissa_bits=0, min_exponent=-127, max=2.0**127)
F32 = ElementFormat("f32", bits=32, mantissa_bits=23, min_exponent=-126, max=(2 - 2.0**-23) * 2.0**127)
ELEMENTS = (E2M1, E4M3)  # of a BlockFormat; tensor.py knows how each is stored
SCALES = (E4M3, E8M0, F32)


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """How a tensor is scaled: value = element * block scale * global scale.

    block: elements along K that share a scale of format `scale`; None (with scale None) means no block scales.
    has_global: an f32 scale per scaled unit (token, expert or tensor) on top of E4M3 block scales, or alone.
    rows: rows of the last two axes that share a block scale, so that tiles are rows x block; for weights.
    rule: how the largest magnitude of a block becomes a power of two, one of SCALE_RULES; E8M0 scales only.
    choice: four-over-six: a block's largest magnitude goes to 4 instead of 6 where that lowers the block's error, the
        sum of its squared or absolute errors; one of CHOICES, NVFP4 without tiles only. Errors are f32, as in
        Transformer Engine: where they over- or underflow all blocks get 6 (squared: units with amax beyond about 1e-16
        or 1e19; absolute: 1e35).
    scale_max: the block scale that a unit's largest magnitude gets; None means the largest there is.

    Raises ValueError for combinations without meaning.
    """

    name: str
    element: ElementFormat
    block: int | None
    scale: ElementFormat | None
    has_global: bool
    rows: int = 1
    rule: str | None = None
    choice: str | None = None
    scale_max: float | None = None

    def __post_init__(self):
        def need(condition: bool, what: str):
            if not condition:
                raise ValueError(f"format {self.name}: {what}")

        need(self.element in ELEMENTS, f"cannot store elements {self.element}: choose one of {_names(ELEMENTS)}")
        known = self.scale is None or self.scale in SCALES
        need(known, f"cannot store scales {self.scale}: choose one of {_names(SCALES)}")
        need((self.block is None) == (self.scale is None), "block and scale go together: set both or neither")
        need(self.block is not None or self.has_global, "no scale at all: set block and scale, or has_global")
        need(not self.has_global or self.scale in (None, E4M3), "has_global goes with E4M3 block scales or none")
        for field, size in (("block", self.block), ("rows", self.rows)):
            need(size is None or (isinstance(size, int) and size > 0), f"{field}={size} is no positive integer")
        need(self.rows == 1 or self.block is not None, f"rows={self.rows} needs a block")
        rules = SCALE_RULES if self.scale == E8M0 else (None,)
        need(self.rule in rules, f"rule {self.rule!r} is not one of {rules} for this scale")
        fits = (self.element, self.scale, self.has_global, self.rows) == (E2M1, E4M3, True, 1)
        choices = (None, *CHOICES) if fits else (None,)
        need(self.choice in choices, f"choice {self.choice!r} is not one of {choices} for these scales")
        need(self.scale_max is None or self.scale == E4M3, f"scale_max={self.scale_max} needs E4M3 block scales")
        fits = self.scale_max is None or 0 < self.scale_max <= self.scale.max
        need(fits, f"scale_max={self.scale_max} is not in (0, {E4M3.max:g}], the E4M3 numbers")

    @property
    def largest(self) -> float:
        """What a unit's amax is mapped to: largest element times block scale (2688 for NVFP4, 448 for FP8)."""
        if self.scale is None:
            return self.element.max
        return self.element.max * (self.scale.max if self.scale_max is None else self.scale_max)

    @property
    def exact_in_bf16(self) -> bool:
        """Whether element * block scale is exact in bf16: what a GEMM operand with the global scale after it needs."""
        bits = 1 + self.element.mantissa_bits + (0 if self.scale is None else 1 + self.scale.mantissa_bits)
        return bits <= _BF16_SIGNIFICANT_BITS


def _names(formats: tuple[ElementFormat, ...]) -> str:
    return ", ".join(f.name for f in formats)


NVFP4 = BlockFormat("nvfp4", E2M1, block=16, scale=E4M3, has_global=True)
NVFP4_16X16 = BlockFormat("nvfp4_16x16", E2M1, block=16, scale=E4M3, has_global=True, rows=16)
NVFP4_4O6_MSE = BlockFormat(
    "nvfp4_4o6_mse", E2M1, block=16, scale=E4M3, has_global=True, choice="squared", scale_max=256.0
)
NVFP4_4O6_MAE = BlockFormat(
    "nvfp4_4o6_mae", E2M1, block=16, scale=E4M3, has_global=True, choice="absolute", scale_max=256.0
)
MXFP4_FLOOR = BlockFormat("mxfp4_floor", E2M1, block=32, scale=E8M0, has_global=False, rule="floor")
MXFP4_RCEIL = BlockFormat("mxfp4_rceil", E2M1, block=32, scale=E8M0, has_global=False, rule="rceil")
MXFP4_EVEN = BlockFormat("mxfp4_even", E2M1, block=32, scale=E8M0, has_global=False, rule="even")
MXFP8_FLOOR = BlockFormat("mxfp8_floor", E4M3, block=32, scale=E8M0, has_global=False, rule="floor")
MXFP8_RCEIL = BlockFormat("mxfp8_rceil", E4M3, block=32, scale=E8M0, has_global=False, rule="rceil")
MXFP8_EVEN = BlockFormat("mxfp8_even", E4M3, block=32, scale=E8M0, has_global=False, rule="even")
FP8 = BlockFormat("fp8", E4M3, block=None, scale=None, has_global=True)
FP8_1X128 = BlockFormat("fp8_1x128", E4M3, block=128, scale=F32, has_global=False)
FP8_128X128 = BlockFormat("fp8_128x128", E4M3, block=128, scale=F32, has_global=False, rows=128)

FORMATS = {
    "nvfp4": NVFP4,
    "nvfp4_16x16": NVFP4_16X16,
    "nvfp4_4o6_mse": NVFP4_4O6_MSE,
    "nvfp4_4o6_mae": NVFP4_4O6_MAE,
    "mxfp4_floor": MXFP4_FLOOR,
    "mxfp4_rceil": MXFP4_RCEIL,
    "mxfp4_even": MXFP4_EVEN,
    "mxfp8_floor": MXFP8_FLOOR,
    "mxfp8_rceil": MXFP8_RCEIL,
    "mxfp8_even": MXFP8_EVEN,
    "fp8": FP8,
    "fp8_1x128": FP8_1X128,
    "fp8_128x128": FP8_128X128,
}
