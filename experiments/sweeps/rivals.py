"""QUADS beside what else is done against the mismatch of rollout and trainer, under other losses, and in a dense model:
three seeds of the 20 M model, settings as in `paper.CHAIN_SUM` where an arm does not say otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.sweeps import paper
from experiments.sweeps.spec import Sweep

SEEDS = (0, 1, 2)
RECIPES = ("BF16", "NAIVE", "QUADS:0.5")

Arm = Mapping[str, str]  # {path: text}


def _arms(plain: Arm, arms: Sequence[Arm]) -> dict[str, tuple[str, ...]]:
    """The axis that has an arm a row, with the texts of `plain` where an arm names none."""
    assert all(arm.keys() <= plain.keys() for arm in arms)
    return {path: tuple(arm.get(path, text) for arm in arms) for path, text in plain.items()}


def _sweep(name: str, plain: Arm, arms: Sequence[Arm]) -> Sweep:
    """Arms against the first of them."""
    baseline = dict(plain) | dict(arms[0])
    zips = (_arms(plain, arms),)
    return dataclasses.replace(paper.CHAIN_SUM, name=name, grid={}, zips=zips, seeds=SEEDS, baseline=baseline)


# The rollout's own old log-probs, under which the mismatch costs most, and recomputed ones, which corrections need
_OWN, _RECOMPUTED = {"update.old_logp": "behaviour"}, {"update.old_logp": "trainer"}
_TIS, _MIS = _RECOMPUTED | {"update.correction": "tis"}, _RECOMPUTED | {"update.correction": "mis"}
_REPLAY, _ZERO_GAP = {"update.routing_replay": "true"}, _RECOMPUTED | {"update.zero_gap": "true"}
_PLAIN = {"recipe": "BF16", **_OWN, "update.correction": "none", "update.routing_replay": "false"}
_PLAIN |= {"update.zero_gap": "false"}
RIVALS = _sweep(
    "rivals",
    _PLAIN,
    (
        {},
        *(
            {"recipe": "NAIVE", **rival}
            for rival in (_OWN, _RECOMPUTED, _TIS, _MIS, _OWN | _REPLAY, _RECOMPUTED | _REPLAY)
        ),
        *({"recipe": "QUADS:0.5", **rival} for rival in (_OWN, _RECOMPUTED, _TIS, _OWN | _REPLAY)),
        *({"recipe": recipe} for recipe in ("QUADS:1", "SYM", "W4A16")),
        {"recipe": "NAIVE", **_ZERO_GAP},
    ),
)

# An engine that rounds elsewhere than its trainer: nothing is rounded to BF16 in the rollout but what is quantized
_DRIFT = {"recipe": "BF16", **_OWN, "recipe.rollout_dtype": "float32"}
DRIFT = _sweep(
    "rivals_drift",
    _DRIFT,
    ({"recipe.rollout_dtype": "none"}, *({"recipe": recipe} for recipe in (*RECIPES, "QUADS:1", "SYM"))),
)

_BEHAVIOUR = dataclasses.replace(
    paper.CHAIN_SUM,
    train=dataclasses.replace(
        paper.CHAIN_SUM.train, update=dataclasses.replace(paper.CHAIN_SUM.train.update, old_logp="behaviour")
    ),
    seeds=SEEDS,
    baseline={"recipe": "BF16"},
)

# Losses, each with its authors' clip and normalisation; under `dapo` also their dynamic sampling. Corrections are off.
LOSSES = {
    "update.loss": ("gspo", "ppo_clip", "cispo"),
    "update.clip_low": ("3e-4", "0.2", "1.0"),
    "update.clip_high": ("4e-4", "0.28", "4.0"),
    "update.length_norm": ("sequence", "token", "token"),
    "dynamic_sampling": ("false", "true", "false"),
}
DENSE_MODEL = dataclasses.replace(paper.CHAIN_SUM.warm_start.model, experts=0, top_k=0, d_mlp=16 * 256)  # 20.1 M too
OTHER_LOSSES = dataclasses.replace(_BEHAVIOUR, name="rivals_losses", grid={"recipe": RECIPES}, zips=(LOSSES,))
DENSE = dataclasses.replace(
    _BEHAVIOUR,
    name="rivals_dense",
    grid={"recipe": (*RECIPES, "QUADS:1")},
    warm_start=dataclasses.replace(paper.CHAIN_SUM.warm_start, model=DENSE_MODEL),
)
SWEEPS = (RIVALS, DRIFT, OTHER_LOSSES, DENSE)
