"""Sweeps that have a name, each in full and as a smoke test for a CPU."""

from __future__ import annotations

from typing import NamedTuple

from experiments.sweeps import paper, prototype, rivals
from experiments.sweeps.spec import Sweep


class Named(NamedTuple):
    full: Sweep
    smoke: Sweep


SWEEPS = {
    "prototype": Named(prototype.PROTOTYPE, prototype.PROTOTYPE_SMOKE),
    "mixture": Named(prototype.MIXTURE, prototype.MIXTURE_SMOKE),
    **{
        sweep.name: Named(sweep, paper.smoke(sweep))
        for sweep in (
            paper.CHAIN_SUM_TUNING,
            paper.FOUR_TASKS_TUNING,
            paper.CHAIN_SUM,
            paper.FOUR_TASKS,
            paper.DUAL_CLIP,
            paper.POLICIES,
            *rivals.SWEEPS,
        )
    },
}
