"""A checkpoint as a folder that servers load: bf16, or NVFP4 as compressed-tensors or ModelOpt write it."""

from __future__ import annotations

import json

from experiments import common
from quads_jax import config_tree
from quads_jax.checkpoints import load_weights
from quads_jax.exporting import ExportConfig, check_export, export


def run() -> None:
    common.refuse_unused("workdir", "set", "dry_run", "task", "recipe")
    config = common.configured(ExportConfig())
    with common.usage_errors():
        check_export(config, *load_weights(config.init)[1:])
    if common.FLAGS.dry_run:
        print(json.dumps(config_tree.to_json(config), indent=1))
        return
    with common.usage_errors():
        workdir = common.new_folder("export")
        record = export(config, workdir)
    dense = 2 * record["parameters"]
    print(
        f"{workdir}: {config.format}, family {record['family']}, {record['parameters']:,} parameters in "
        f"{record['bytes']:,} bytes ({record['bytes'] / dense:.2f} of bf16)"
    )
    print(f"served as {record['served_as']}")
    if record["tokenizer_files"]:
        print(f"tokenizer: {', '.join(record['tokenizer_files'])}")
    else:
        print(
            "no tokenizer files: init names no task, or one whose files have changed; give --set=tokenizer=FOLDER, or "
            "ask servers with ids"
        )
    print(f"where it comes from: {workdir / 'export.json'}", flush=True)


if __name__ == "__main__":
    common.main(run)
