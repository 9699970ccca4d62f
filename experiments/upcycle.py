"""A dense checkpoint made a mixture of experts that computes the same: copies of every MLP and new routers."""

from __future__ import annotations

import json

import jax

from experiments import common
from quads_jax import config_tree
from quads_jax.checkpoints import load_weights, save_weights, weights_sha256
from quads_jax.config_checks import MAX_SEED
from quads_jax.models.decoder import parameter_count
from quads_jax.models.upcycle import UpcycleConfig, upcycle


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run")
    config = common.configured(UpcycleConfig(init=""))
    with common.usage_errors():
        if not config.init:
            raise ValueError("--experiment=upcycle needs --set=init=FILE: a dense checkpoint, a file or a folder")
        if not 0 <= config.seed <= MAX_SEED:
            raise ValueError(f"seed={config.seed} must be at least 0 and at most {MAX_SEED}")
        params, model, _ = load_weights(config.init)
        options = {"experts": config.experts, "top_k": config.top_k, "noise": config.noise}
        new = lambda key: upcycle(params, model, key, **options)  # noqa: E731
        jax.eval_shape(lambda key: new(key)[0], jax.random.key(0))  # checks, and no more
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        path = common.new_folder("upcycle") / "weights.msgpack"
    made, sparse = new(jax.random.key(config.seed))
    about = {"upcycled": config_tree.to_json(config) | {"sha256": weights_sha256(config.init)}}
    save_weights(path, made, sparse, about)
    print(f"{path}: {parameter_count(made):,} parameters of {parameter_count(params):,}, {config.experts} experts")
    print(f"use it with --set=init={path}", flush=True)


if __name__ == "__main__":
    common.main(run)
