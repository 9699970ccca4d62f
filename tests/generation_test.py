"""Generation: rows, log-probs and finish reasons of both kinds of checkpoints, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver

from experiments import common
from experiments import generate as generate_job
from quads_jax.checkpoints import load_weights, save_weights
from quads_jax.config import RecipeConfig, TrainConfig
from quads_jax.config_tree import to_json
from quads_jax.exporting import ExportConfig, export
from quads_jax.generation import GenerateConfig, check_generate, encoded, generate, read_prompts, tokenizer_of
from quads_jax.models import hf
from quads_jax.precision import Precision
from quads_jax.programs import pack_program, rollout_program
from quads_jax.rl.rollout import score
from quads_jax.rl.sampling import SamplingConfig
from tests.tiny import MODEL, TASK, params

pytestmark = pytest.mark.quick

PROMPTS = ["1+2+3=", "4-5=", "7+8-9="]


def lines(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


@pytest.fixture
def cfg(tmp_path):
    file = lines(tmp_path / "prompts.jsonl", *({"prompt": text, "answer": "unread"} for text in PROMPTS))
    recipe = RecipeConfig(name="BF16", dtype="float32")
    return GenerateConfig(prompts=file, task=TASK, recipe=recipe, samples=2, max_new_tokens=5, slots=2)


def test_rows_say_what_was_sampled_and_how_likely_it_was(cfg):
    check_generate(cfg)
    tokenizer = tokenizer_of(cfg, MODEL)
    rows = list(generate(cfg, params(), MODEL, tokenizer, read_prompts(cfg.prompts)))
    assert [(row["prompt"], row["sample"]) for row in rows] == [(text, i) for text in PROMPTS for i in range(2)]
    prompts, valid = encoded(tokenizer, PROMPTS, cfg.prompts)
    assert valid.sum(1).tolist() == [1 + len(text) for text in PROMPTS] and valid[:, -1].all()
    width = prompts.shape[1]
    ids, seen = np.zeros((6, width + 5), np.int32), np.zeros((6, width + 5), bool)
    for at, row in enumerate(rows):
        stopped = row["tokens"][-1] == tokenizer.eos_id
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["tokens"]) == 5
        assert row["answer"] == tokenizer.decode(row["tokens"][:-1] if stopped else row["tokens"])
        assert row["log_prob"] == pytest.approx(sum(row["log_probs"]))
        end = width + len(row["tokens"])
        ids[at, :end], seen[at, :end] = [*prompts[at // 2], *row["tokens"]], [*valid[at // 2], *[True] * (end - width)]
    fixed = {"model": MODEL, "precision": Precision(dtype="float32"), "sampling": cfg.sampling(())}
    logp, *_ = jax.jit(functools.partial(score, prompt_len=width, **fixed))(params(), {}, ids, seen)
    for at, row in enumerate(rows):
        logs = np.asarray(logp)[at, width : width + len(row["tokens"])]
        # observed 3e-6 nats: cached decode against one full pass, in float32
        np.testing.assert_allclose(row["log_probs"], logs, atol=5e-5)


def test_a_folder_brings_its_tokenizer_and_every_eos_id_stops(cfg, tmp_path):
    """Weights of a folder, channel orders measured on the prompts, a tokenizer of bytes of which half stop."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers, see requirements.txt")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([], trainer)
    folder = tmp_path / "hub"
    model = dataclasses.replace(MODEL, vocab_size=260, tied_head=False)
    hf.save(folder, params_of(model), model, "qwen3_moe")
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(100, 250))}))
    cfg = dataclasses.replace(cfg, init=str(folder), task=GenerateConfig().task, recipe=RecipeConfig(), slots=4)
    check_generate(cfg)
    loaded, read = hf.load(folder)
    tokenizer = tokenizer_of(cfg, read)
    rows = list(generate(cfg, loaded, read, tokenizer, read_prompts(cfg.prompts)))
    stops = {0, *range(100, 250)}
    for row in rows:
        inside = [token in stops for token in row["tokens"]]
        assert not any(inside[:-1]) and inside[-1] == (row["finish_reason"] == "stop")
    assert len(rows) == 6 and any(row["finish_reason"] == "stop" and row["tokens"][-1] != 0 for row in rows)


def test_an_exported_run_is_played_with_the_ids_of_its_own_rollout(tmp_path):
    """Greedy, from text: the folder says how the task spells it, and where an answer ends."""
    pytest.importorskip("tokenizers", reason="needs tokenizers, see requirements.txt")
    path, folder = tmp_path / "run.msgpack", tmp_path / "out"
    save_weights(path, params(), MODEL, {"config": to_json(TrainConfig(task=TASK))})
    recipe = RecipeConfig(name="W4A16", dtype="float32")
    export(ExportConfig(init=str(path), format="modelopt", recipe=recipe), folder)
    tokens, valid, items = TASK.prompts(0, "held_out", 0, 6)
    precision, sampling = recipe.resolve().rollout, SamplingConfig(temperature=0.0, max_new_tokens=5, stop_ids=(2,))
    program = rollout_program(MODEL, precision, sampling, TASK.tokenizer.pad_id, tokens.shape)
    packed = pack_program(MODEL, precision)(load_weights(path)[0], {})
    batch = program(packed, {}, tokens, valid, jax.random.key(0), jnp.int32(0))
    own = [row[keep].tolist() for row, keep in zip(np.asarray(batch.tokens), np.asarray(batch.mask), strict=True)]
    file = lines(tmp_path / "played.jsonl", *({"prompt": item.prompt} for item in items))
    settings = {"init": str(folder), "prompts": file, "recipe": recipe, "temperature": 0.0, "max_new_tokens": 5}
    play = GenerateConfig(**settings, slots=4)
    check_generate(play)
    loaded, model, _ = load_weights(folder)
    rows = list(generate(play, loaded, model, tokenizer_of(play, model), read_prompts(file)))
    assert [row["tokens"] for row in rows] == own
    shown = [row["answer"].replace("<pad>", "\ufffd").replace("<bos>", "\ufffd") for row in rows]
    assert shown == [TASK.tokenizer.decode(ids) for ids in own]
    assert len({tuple(ids) for ids in own}) > 1


def params_of(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: np.float32(rng.normal(size=a.shape) * a.shape[-1] ** -0.5), hf.parameter_shapes(model)
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=""), "prompts is empty: name a file"),
        (dict(temperature=0.0), "temperature=0 is greedy: all samples=2 would be the same"),
        (dict(slots=0), "slots=0 must be at least 1"),
        (dict(recipe=RecipeConfig(policy="online")), "policy online chooses"),
        (dict(recipe=RecipeConfig(refresh_every=2)), "refresh_every=2 has no effect"),
        (dict(recipe=RecipeConfig(trainer_gemm="blocked")), "trainer_gemm=blocked has no effect"),
        (dict(init="tests"), "task=chain_sum has no effect on 'tests'"),
    ],
)
def test_bad_settings_are_refused(cfg, change, message):
    with pytest.raises(ValueError, match=message):
        check_generate(dataclasses.replace(cfg, **change))


def test_a_role_that_the_model_lacks_is_refused(tmp_path):
    file = lines(tmp_path / "prompts.jsonl", {"prompt": "1+1="})
    common.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(set=[f"prompts={file}", "recipe.roles=head"], workdir=str(tmp_path / "run")):
        with pytest.raises(app.UsageError, match="recipe.roles=head: the model has no layer of role head; it has att"):
            generate_job.run()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("entry", [{"text": "1+1="}, {"prompt": 3}, {"prompt": ""}, ["1+1="]])
def test_a_line_without_a_prompt_is_named(entry, tmp_path):
    with pytest.raises(ValueError, match=r"bad.jsonl:2: .* is no object with a text 'prompt'"):
        read_prompts(lines(tmp_path / "bad.jsonl", {"prompt": "1+1="}, entry))


def test_prompts_that_the_tokenizer_cannot_read_are_named(cfg):
    with pytest.raises(ValueError, match=r"file:2: cannot encode \['x'\]"):
        encoded(tokenizer_of(cfg, MODEL), ["1+1=", "1+x="], "file")
    with pytest.raises(ValueError, match="has 40 ids, 17 are needed"):
        tokenizer_of(cfg, dataclasses.replace(MODEL, vocab_size=40))
