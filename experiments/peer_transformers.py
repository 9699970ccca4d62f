"""PyTorch's transformers on a model of OLMoE-1B-7B's or Qwen3-30B-A3B's sizes, random weights, BF16: decode tokens a
second, the peer of `--experiment=throughput`. Needs torch and transformers, of this project the models' sizes alone.

    python -m experiments.peer_transformers --model=olmoe-1b-7b --batch=64 --context=512

A time is a slope: `generate` of MANY new tokens less that of FEW, so that prefill drops out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

from quads_jax.models.presets import MODELS, write_config

FEW, MANY, REPEATS = 16, 80, 3
FAMILIES = {"olmoe-1b-7b": "olmoe", "qwen3-30b-a3b": "qwen3_moe"}


def config(name: str, layers: int | None) -> dict[str, Any]:
    """The config.json of a model, with fewer layers where `layers` says so."""
    model = MODELS[name]
    return write_config(FAMILIES[name], dataclasses.replace(model, layers=layers or model.layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="olmoe-1b-7b", choices=tuple(FAMILIES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--cache", default=None, help="transformers' cache_implementation, e.g. static")
    args = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as error:
        parser.exit(1, f"{error.name} is not installed: on a machine with a GPU, pip install torch transformers\n")
    if not torch.cuda.is_available():
        parser.exit(1, "this is a measurement of a GPU, and torch sees none\n")
    torch.manual_seed(0)
    said = config(args.model, args.layers)
    sizes = transformers.CONFIG_MAPPING[said["model_type"]].from_dict(said)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(
            sizes, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    tokens = torch.randint(100, 50000, (args.batch, args.context), device="cuda")
    extra = {} if args.cache is None else {"cache_implementation": args.cache}

    def run(new: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
            **extra,
        )
        torch.cuda.synchronize()
        if out.shape[1] != args.context + new:
            raise RuntimeError(f"{out.shape[1] - args.context} tokens were generated instead of {new}")
        return time.perf_counter() - start

    with torch.inference_mode():
        run(FEW), run(MANY)
        slopes = [(run(MANY) - run(FEW)) / (MANY - FEW) for _ in range(REPEATS)]
    seconds = statistics.median(slopes)
    row = {
        "what": f"{args.model}, decode, transformers generate BF16, batch {args.batch}, context {args.context}",
        "value": args.batch / seconds,
        "unit": "tokens/s",
        "seconds": seconds,
        "seconds_least": min(slopes),
        "seconds_most": max(slopes),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
