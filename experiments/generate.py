"""Answers of a checkpoint to the prompts of a file, with log-probs and finish reasons, under any recipe."""

from __future__ import annotations

import json
import time

from experiments import common
from quads_jax import config_tree
from quads_jax.checkpoints import load_weights
from quads_jax.device import OutOfMemory, memory_phase
from quads_jax.generation import GenerateConfig, check_generate, generate, read_prompts, tokenizer_of
from quads_jax.importing import rollout_reads
from quads_jax.step import check_roles

SHOWN = 3


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "task", "recipe")
    config = common.configured(GenerateConfig())
    with common.usage_errors():
        check_generate(config)
        prompts = read_prompts(config.prompts)
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        params, model, meta = load_weights(config.init)
        check_roles(config.recipe.roles, model)
        tokenizer = tokenizer_of(config, model)
        workdir = common.new_folder("generate")
    if said := rollout_reads(meta, config.recipe.resolve().rollout):
        print(said)
    source = common.source("generate")
    about = config_tree.to_json(config) | source
    (workdir / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    started, tokens, stopped, rows = time.perf_counter(), 0, 0, 0
    path = workdir / "answers.jsonl"
    try:
        with (
            common.usage_errors(),
            memory_phase("generate", f"lower slots={config.slots} or max_new_tokens={config.max_new_tokens}"),
            path.open("w", encoding="utf-8") as file,
        ):
            for row in generate(config, params, model, tokenizer, prompts):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                rows, tokens, stopped = (
                    rows + 1,
                    tokens + len(row["tokens"]),
                    stopped + (row["finish_reason"] == "stop"),
                )
                if rows <= SHOWN:
                    print(
                        f"{row['prompt']!r} -> {row['answer']!r} ({row['finish_reason']}, {row['log_prob']:.2f} nats)"
                    )
    except OutOfMemory as error:
        raise SystemExit(f"\n{error}") from error
    took = time.perf_counter() - started
    print(f"{rows} answers, {stopped} stopped, {tokens} tokens in {took:.1f} s with compilation: {path}")


if __name__ == "__main__":
    common.main(run)
