"""Scores of one checkpoint: pass@1 with its interval, pass@k, majority@k, by task, under several precisions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax.config import EvaluateConfig, TrainConfig
from quads_jax.models.config import ModelConfig
from quads_jax.programs import pack_program, rollout_program
from quads_jax.rl.sampling import SamplingConfig
from quads_jax.step import Setup, decode_responses, init_state, setup
from quads_jax.tasks.base import Item


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Unbiased pass@k of each prompt, 1 - C(n-c, k) / C(n, k), from c of n samples (Chen et al. 2021, eq. 1).

    Args: correct i[N], samples n, 1 <= k <= n (else ValueError). Returns f64[N].
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be in 1..{samples}, the samples a prompt")
    return np.array([1.0 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct])


def majority_is_correct(texts: Sequence[str], finished: Sequence[bool], right: Sequence[bool]) -> bool:
    """Whether the most frequent finished answer of one prompt is right; ties go to the one seen first."""
    votes = Counter(text for text, done in zip(texts, finished, strict=True) if done)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(ok for text, ok in zip(texts, right, strict=True) if text == winner)


def interval(values: np.ndarray) -> tuple[float, float]:
    """(mean, half width of its 95 % interval) over prompts: samples of one prompt are not independent, prompts are."""
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def sample_answers(s: Setup, packed: Any, quant: Any, items: tuple, samples: int, seed: int) -> dict[str, np.ndarray]:
    """`samples` answers to each of N prompts under the rollout's precision: {"text", "finished", "right"}, each [N, n].

    items: what `Task.prompts` gives. Row r of call c draws from fold_in(key(seed), c) and r: fixed, whatever the
    recipe.
    """
    prompts, valid, questions = items
    program = rollout_program(s.model, s.recipe.rollout, s.sampling, s.cfg.task.tokenizer.pad_id, s.shape)
    total, rows = len(questions) * samples, s.shape[0]
    index = np.arange(-(-total // rows) * rows) % total // samples  # prompt of each row; the last call is filled up
    texts, finished = [], []
    for call, chunk in enumerate(index.reshape(-1, rows)):
        key = jax.random.fold_in(jax.random.key(seed), call)
        batch = program(packed, quant, prompts[chunk], valid[chunk], key, jnp.int32(0))
        texts += decode_responses(s.cfg.task, batch, s.shape[1])
        finished += np.asarray(batch.finished).tolist()
    repeated: list[Item] = [questions[i] for i in index[:total]]
    right = s.cfg.task.reward(repeated, texts[:total], finished[:total]) > 0
    shape = (len(questions), samples)
    return {
        "text": np.array(texts[:total], object).reshape(shape),
        "finished": np.array(finished[:total]).reshape(shape),
        "right": right.reshape(shape),
    }


def scores(answers: dict[str, np.ndarray], ks: Sequence[int]) -> dict[str, float]:
    """pass@1 with the half width of its 95 % interval, pass@k, majority@n and truncation of `sample_answers`."""
    right = answers["right"]
    samples = right.shape[1]
    mean, half = interval(right.mean(1))
    out = {"pass@1": mean, "pass@1_ci95": half, "truncation_rate": float(1 - answers["finished"].mean())}
    for k in ks:
        out[f"pass@{k}"] = float(pass_at_k(right.sum(1), samples, k).mean())
    if samples > 1:
        rows = zip(answers["text"], answers["finished"], right, strict=True)
        out[f"majority@{samples}"] = float(np.mean([majority_is_correct(*row) for row in rows]))
    return out


def setups(cfg: EvaluateConfig, model: ModelConfig) -> list[Setup]:
    """One `Setup` a recipe. Raises ValueError where the task, the recipe or the sampling does not fit the model."""
    runs = [
        TrainConfig(init=cfg.init, task=cfg.task, recipe=recipe, rollout=cfg.rollout(), eval=cfg.eval())
        for recipe in cfg.recipe_configs()
    ]
    return [setup(run, model) for run in runs]


def evaluate_checkpoint(cfg: EvaluateConfig, params: Any, model: ModelConfig) -> Iterator[dict[str, Any]]:
    """Rows {"recipe", "precision", "task", "decoding", "prompts", "samples", scores...} for every recipe, task and
    decoding (sampled at `cfg.temperature`, and greedy with one sample), on the same fixed held-out prompts.
    """
    for s in setups(cfg, model):
        state = init_state(s, params)
        packed = pack_program(model, s.recipe.rollout)(state.params, state.quant)
        for decoding, sampling, samples in _decodings(cfg, s):
            for label in cfg.task.labels:
                questions = cfg.task.only(label).prompts(cfg.seed, "held_out", 0, cfg.prompts)
                answers = sample_answers(
                    s._replace(sampling=sampling), packed, state.quant, questions, samples, cfg.seed
                )
                row = {
                    "recipe": s.recipe.label,
                    "precision": s.recipe.rollout.name,
                    "task": label,
                    "decoding": decoding,
                }
                ks = [k for k in cfg.ks if k <= samples]  # greedy: none
                yield row | {"prompts": cfg.prompts, "samples": samples} | scores(answers, ks)


def _decodings(cfg: EvaluateConfig, s: Setup) -> list[tuple[str, SamplingConfig, int]]:
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=s.sampling.max_new_tokens, stop_ids=s.sampling.stop_ids)
    return [(f"temperature {cfg.temperature:g}", s.sampling, cfg.samples), ("greedy", greedy, 1)]
