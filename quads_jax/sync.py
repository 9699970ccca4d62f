"""The check of the weight sync: that what the rollout reads is what packing the current parameters gives."""

from __future__ import annotations

from typing import Any

import jax

from quads_jax.models.config import ModelConfig
from quads_jax.precision import Precision
from quads_jax.programs import stale_program
from quads_jax.rl.types import TrainState


class StaleSync(RuntimeError):
    """What the rollout would read is not what a sync of the current parameters gives."""


def check_sync(model: ModelConfig, precision: Precision, state: TrainState, packed: Any) -> None:
    """Raises StaleSync, naming every packed array that is not, bit for bit, what a sync gives now: one that it did not
    rewrite, so that the rollout would sample from another policy than the batch's version says. "sync/flipped" of a
    step says how much a sync changes; this, whether it changed all that it should. Packs once more, and keeps nothing.
    """
    differs = jax.device_get(stale_program(model, precision)(packed, state.params, state.quant))
    if names := [name for name, wrong in differs.items() if wrong]:
        raise StaleSync(
            f"step {int(state.step) + 1}: {len(names)} of {len(differs)} packed arrays were not rewritten by the sync: "
            f"{', '.join(names)}; pack the parameters again before the rollout"
        )
