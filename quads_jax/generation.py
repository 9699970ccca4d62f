"""Answers of a checkpoint to the prompts of a file, through the continuous engine under any recipe."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quads_jax.config import SHIPPED_TASK, RecipeConfig
from quads_jax.config_checks import MAX_SEED, check_untrained
from quads_jax.config_tree import located, parse_json, show
from quads_jax.models.config import ModelConfig
from quads_jax.programs import engine_program, pack_program, statistics_program
from quads_jax.rl.calibration import channel_orders
from quads_jax.rl.engine import check_engine, finish_reasons
from quads_jax.rl.sampling import SamplingConfig, check_sampling
from quads_jax.tasks import CharTokenizer, Task
from quads_jax.tasks.hf_tokenizer import HfTokenizer, TextError, folder_sha256

CALIBRATION_ROWS = 256
MAX_TOKENS = 2**20  # of a prompt or an answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Whose answers to what, under the rollout side of a recipe."""

    init: str = "shipped"  # a weights file, or a checkpoint folder of the Hugging Face hub with its tokenizer
    prompts: str = ""  # a file of JSON lines with a text "prompt"; must be given
    task: Task = SHIPPED_TASK  # of a weights file: whose tokenizer reads the prompts
    recipe: RecipeConfig = RecipeConfig()
    samples: int = 1  # answers a prompt, which share its prefill
    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int = 128
    slots: int = 16
    seed: int = 0

    def sampling(self, stop_ids: tuple[int, ...]) -> SamplingConfig:
        return SamplingConfig(
            temperature=self.temperature, max_new_tokens=self.max_new_tokens, stop_ids=tuple(stop_ids)
        )


def check_generate(cfg: GenerateConfig) -> None:
    """Raises ValueError on a config that cannot run or holds a setting without effect."""
    with located("recipe"):
        resolved = cfg.recipe.resolve()
        check_engine(resolved.rollout, max(1, cfg.slots), max(1, cfg.samples))
    check_untrained(cfg.recipe, sampled=True)
    check_sampling(cfg.sampling(()), training=False)
    limits = {"samples": 2**20, "slots": 2**20, "max_new_tokens": MAX_TOKENS}
    for name, high in limits.items():
        if not 1 <= getattr(cfg, name) <= high:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1 and at most {high}")
    if not 0 <= cfg.seed <= MAX_SEED:
        raise ValueError(f"seed={cfg.seed} must be at least 0 and at most {MAX_SEED}")
    if cfg.temperature == 0 and cfg.samples > 1:
        raise ValueError(f"temperature=0 is greedy: all samples={cfg.samples} would be the same; ask for 1")
    if os.path.isdir(cfg.init) and cfg.task != SHIPPED_TASK:
        raise ValueError(f"task={cfg.task.name} has no effect on {cfg.init!r}: a folder brings its own tokenizer")
    if not cfg.prompts:
        raise ValueError("prompts is empty: name a file of JSON lines with a text 'prompt', --set=prompts=FILE")


def read_prompts(file: str) -> list[str]:
    """The text "prompt" of every line's object; other fields are left alone. Raises ValueError naming file and line."""
    try:
        lines = Path(file).read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise ValueError(f"prompts={file!r} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        with located(f"{file}:{number}"):
            entry = parse_json(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
                raise ValueError(f"{show(entry)} is no object with a text 'prompt'")
        found.append(entry["prompt"])
    return found


def tokenizer_of(cfg: GenerateConfig, model: ModelConfig) -> CharTokenizer | HfTokenizer:
    """The folder's, or the task's. Raises ValueError where the model is not of its vocabulary."""
    tokenizer = HfTokenizer(cfg.init, folder_sha256(cfg.init)) if os.path.isdir(cfg.init) else cfg.task.tokenizer
    if not tokenizer.fits(model.vocab_size):
        raise ValueError(
            f"the model of init={cfg.init!r} has {model.vocab_size} ids, {tokenizer.vocab_size} are needed"
        )
    return tokenizer


def encoded(tokenizer: CharTokenizer | HfTokenizer, prompts: list[str], file: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[N,P] padded on the left, valid bool[N,P]). Raises ValueError naming the line of a bad prompt."""
    try:
        if isinstance(tokenizer, HfTokenizer):
            ids = tokenizer.encode_prompts(prompts)
        else:
            ids = []
            for number, text in enumerate(prompts, start=1):
                with located(f"{file}:{number}"):
                    ids.append([tokenizer.bos_id, *tokenizer.encode(text)])
    except TextError as error:
        raise ValueError(f"{file}:{error.at + 1}: prompt is {show(prompts[error.at])}: {error}") from error
    lengths = [len(row) for row in ids]
    for bad in (i for i, n in enumerate(lengths) if not 1 <= n <= MAX_TOKENS):
        raise ValueError(f"{file}:{bad + 1}: prompt has {lengths[bad]} tokens: it must have 1 to {MAX_TOKENS}")
    tokens = np.full((len(ids), max(lengths)), tokenizer.pad_id, np.int32)
    for row, own in zip(tokens, ids, strict=True):
        row[-len(own) :] = own
    return tokens, np.arange(tokens.shape[1]) >= tokens.shape[1] - np.array(lengths)[:, None]


def generate(
    cfg: GenerateConfig, params: Any, model: ModelConfig, tokenizer: CharTokenizer | HfTokenizer, prompts: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows {"prompt", "sample", "answer", "finish_reason", "log_prob", "tokens", "log_probs"}, prompt by prompt.

    log_probs are in nats, of the distribution that was sampled from; the stop token is among the tokens and not in the
    answer. Channels of residual compensation are calibrated on the prompts. Raises ValueError as `encoded`.
    """
    precision = cfg.recipe.resolve().rollout
    tokens, valid = encoded(tokenizer, prompts, cfg.prompts)
    quant = {}
    if precision.needs_order:
        rows = tokens[:CALIBRATION_ROWS], valid[:CALIBRATION_ROWS]
        statistics = statistics_program(model, precision, rows[0].shape)(params, *rows)
        quant = jax.jit(channel_orders, static_argnums=2)(statistics, params, precision)
    packed = pack_program(model, precision)(params, quant)
    sampling = cfg.sampling(tokenizer.stop_ids)
    program = engine_program(model, precision, sampling, tokenizer.pad_id, tokens.shape, cfg.samples, cfg.slots)
    batch, _ = program(packed, quant, tokens, valid, jax.random.key(cfg.seed), jnp.int32(0), None)
    mask, drawn, logp = (np.asarray(a) for a in (batch.mask, batch.tokens, batch.behaviour_logp))
    answers = tokenizer.decode_all([drawn[row][mask[row]].tolist() for row in range(len(drawn))])
    for row, (reason, answer) in enumerate(zip(finish_reasons(batch), answers, strict=True)):
        ids, logs = drawn[row][mask[row]].tolist(), logp[row][mask[row]].tolist()
        yield {
            "prompt": prompts[row // cfg.samples],
            "sample": row % cfg.samples,
            "answer": answer,
            "finish_reason": reason,
            "log_prob": float(sum(logs)),
            "tokens": ids,
            "log_probs": logs,
        }
