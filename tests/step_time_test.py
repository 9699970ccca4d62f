"""Where a step's time goes: attribution on the update's own compiled text, arithmetic, refusals, and a run of it."""

import dataclasses
import functools
import json
import re
import time

import jax
import jax.monitoring
import pytest
from absl.testing import flagsaver

from experiments import common, phases, step_time
from experiments import step_time_cells as cells
from experiments import step_time_report as report
from quads_jax import programs
from quads_jax.config import RecipeConfig
from quads_jax.config_tree import to_json
from quads_jax.models.config import ModelConfig
from quads_jax.tasks.chain_sum import ChainSum

TASK = ChainSum(operands=2, digits=1, modulus=10)
MODEL = ModelConfig(
    vocab_size=TASK.tokenizer.vocab_size,
    d_model=32,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=16,
    experts=2,
    top_k=1,
    d_expert=32,
)
CONFIG = step_time.StepTimeConfig(
    model="tiny", variants=("QAT", "QAT+grouped_mosaic"), prompts=2, group_size=2, steps=2, trainers=()
)  # fmt: skip
MOVES = r" (parameter|get-tuple-element|tuple|constant|bitcast|copy|while|iota|broadcast|call)\("  # no work, or others'


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(run folder, text of the update, names of what was compiled during the timed steps) of CONFIG, only experts
    quantized, compiled in half the time.
    """
    folder, compiled, texts = tmp_path_factory.mktemp("step_time") / "run", [], []
    cached = [value for value in vars(programs).values() if hasattr(value, "cache_clear")]
    quick = functools.partial(programs.traced_once, compiler_options={"xla_backend_optimization_level": 0})
    experts = lambda text: RecipeConfig(name=text, roles=("experts",))  # noqa: E731
    original, figures = cells.rl_step, cells.traced_figures

    def watched(*args):
        before = len(compiled)
        out = original(*args)
        compiled[before:] = [f"step {out[2]['step']}: {name}" for name in compiled[before:]]
        return out

    def note(event, seconds, **about):
        if event.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name", "?"))

    def kept(found, compiled_programs, taken):
        texts.append(compiled_programs["update"].as_text())
        return figures(found, compiled_programs, taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "traced_once", quick)
        patch.setattr(cells, "parse_recipe", experts)
        patch.setattr(cells, "rl_step", watched)
        patch.setattr(cells, "traced_figures", kept)
        patch.setitem(cells.SETTINGS, "tiny", (TASK, MODEL))
        for program in cached:
            program.cache_clear()
        jax.monitoring.register_event_duration_secs_listener(note)
        flags = flagsaver.flagsaver(workdir=str(folder), smoke=True)
        patch.setattr(step_time, "SMOKE", CONFIG)
        with flags:
            common.FLAGS.mark_as_parsed()
            step_time.run()
        jax.monitoring.unregister_event_duration_listener(note)
        for program in cached:
            program.cache_clear()
    return folder, texts[0], compiled


def test_a_run_leaves_rows_a_table_and_a_picture(measured):
    folder, _, _ = measured
    done, skipped = (json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines())
    assert done["variant"] == "QAT" and done["steps"] == 2 and done["device"].startswith("cpu")
    parts = [done[f"wall/{name}"] for name in (*cells.WALL, "other")]
    assert min(parts) > 0 and done["seconds_least"] <= done["seconds"] <= done["seconds_most"]
    assert sum(parts) == pytest.approx(done["seconds"])  # of two steps a median is the mean
    assert "runs on GPUs of compute capability 9" in skipped["skipped"]
    text = (folder / "README.md").read_text()
    assert "| QAT+grouped_mosaic | skipped: implementation grouped_mosaic" in text and "| QAT | " in text
    assert [entry["what"] for entry in json.loads((folder / "summary.json").read_text())] == [
        "step, QAT",
        "step, QAT+grouped_mosaic",
    ]
    assert (folder / "step_time.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_compiled_in_the_timed_steps(measured):
    _, _, compiled = measured
    assert any(name.startswith("step 1:") for name in compiled)  # the one before them: what is small
    assert not any("guarded" in name for name in compiled if name.startswith("step "))  # nor there a large program
    assert not any(name.startswith(("step 2:", "step 3:")) for name in compiled)


def test_a_measurement_is_continued(measured, monkeypatch):
    """With every row there, nothing is built; another config is refused."""
    folder, _, _ = measured
    monkeypatch.setattr(cells, "rl_step", None)
    monkeypatch.setitem(cells.SETTINGS, "tiny", (TASK, MODEL))
    with flagsaver.flagsaver(workdir=str(folder), resume=True):
        before, rows = step_time.opened(CONFIG)
        again = step_time.measure(step_time.check(CONFIG), rows, 0.0, None)
        assert before == folder and again == rows and len(rows) == 2
        assert len(step_time.opened(dataclasses.replace(CONFIG, budget_seconds=9.0))[1]) == 2
        with pytest.raises(ValueError, match="another config"):
            step_time.opened(dataclasses.replace(CONFIG, steps=3))
    late = cells.Cell({"kind": "step", "variant": "QAT"}, (), lambda: built.append(1) or ({}, None))
    built: list[int] = []
    [row] = step_time.measure([late], rows[1:], 0.0, None)  # not kept
    assert row["failed"] == "not run: budget_seconds=0 is used up" and not built


def test_the_budget_counts_compilation():
    """The second of two programs waits for the first one's compiler until the budget is over, and is not compiled."""
    compiled = []

    class Program:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def compile(self):
            time.sleep(self.seconds)
            compiled.append(self.name)

    def cell(name, seconds):
        program = Program(name, seconds)
        return cells.Cell({"kind": "step", "variant": name}, (), lambda: ({name: (program, program)}, lambda _: {}))

    slow = [cell(f"slow{i}", 1.0) for i in range(step_time.common.COMPILERS)]
    rows = step_time.measure([*slow, cell("late", 0.0)], [], 0.2, None)
    assert len(rows) == len(slow) + 1 and {row["failed"] for row in rows} == {"not run: budget_seconds=0.2 is used up"}
    assert "late" not in compiled


def test_a_damaged_row_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_json(CONFIG)))
    (tmp_path / step_time.ROWS).write_text('{"kind": "step"}\n{"kind": "st')
    common.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(workdir=str(tmp_path), resume=True):
        with pytest.raises(ValueError, match=r"rows\.jsonl:2 is damaged \(Unterminated .*: remove the line"):
            step_time.opened(CONFIG)


def test_instructions_of_the_update_by_part(measured):
    """Of those that do work and come from our code, few are in no part; each part is found where its scope says."""
    _, text, _ = measured
    lines = [line for line in text.splitlines() if "op_name=" in line and not re.search(MOVES, line)]
    names = [name for line in lines for name in re.findall(r'op_name="(jit\([^"]*)"', line)]
    found = {part: [n for n in names if phases.phase_of(n, phases.UPDATE) == part] for part in phases.UPDATE.names}
    assert all(found.values())
    assert len(found["rest"]) < 0.15 * len(names)  # metrics
    dots = [n for n in names if n.endswith("dot_general")]
    assert {phases.phase_of(n, phases.UPDATE) for n in dots} >= {"score", "forward", "backward"}
    backward = [n for n in names if "transpose(jvp(" in n]
    kinds = {phases.phase_of(n, phases.UPDATE) for n in backward}
    assert backward and kinds == {"backward", "expert GEMM back"}
    assert any("/attention/" in n for n in found["backward"]) and any("/attention/" in n for n in found["forward"])
    assert all("/experts/" in n for part in ("expert GEMM", "expert GEMM back") for n in found[part])
    assert all("/experts/" in n for n in found["quantize"])  # no other role is quantized
    assert phases.instruction_phases(text, phases.UPDATE).items() >= {
        (name, phases.phase_of(op, phases.UPDATE)) for name, op in phases._INSTRUCTION.findall(text)
    }


# Names as XLA compiled them for an update of W4A16
@pytest.mark.parametrize(
    "part, scopes",
    [
        ("score", "score/while/body/closed_call/Decoder/while/body/closed_call/run_0/attention/multiply/dot_general"),
        ("quantize", "score/while/body/closed_call/Decoder/while/body/closed_call/run_0/moe/experts/quantize/div"),
        ("forward", "while/body/closed_call/gradient/while/body/closed_call/jvp(Decoder)/final_norm/mul"),
        ("forward", "while/body/closed_call/gradient/while/body/closed_call/run_0/attention/jit(_where)/select_n"),
        (
            "expert GEMM",
            "while/body/closed_call/gradient/while/body/closed_call/jvp(Decoder)/while/body/closed_call/run_0/moe/experts/"
            "multiply/bmk,bnk->bmn/dot_general",
        ),
        (
            "expert GEMM back",
            "while/body/closed_call/gradient/while/body/closed_call/transpose(jvp(Decoder))/while/body/closed_call/run_0/"
            "moe/experts/multiply/bmn,bmk->bnk/dot_general",
        ),
        (
            "backward",
            "while/body/closed_call/gradient/while/body/closed_call/transpose(jvp(Decoder))/while/body/closed_call/run_0/"
            "attention/multiply/dot_general",
        ),
        ("backward", "while/body/closed_call/gradient/while/body/closed_call/add"),
        ("optimizer", "while/body/closed_call/optimizer/sqrt"),
        ("rest", "reduce_sum"),
    ],
)
def test_a_part_by_its_scopes(part, scopes):
    assert phases.phase_of(f"jit(guarded)/{scopes}", phases.UPDATE) == part


class Program:
    def __init__(self, *instructions):
        self.lines = [f'  %{name} = f32[] add(), metadata={{op_name="jit(f)/{op}"}}' for name, op in instructions]

    def as_text(self):
        return "\n".join(self.lines)


def kernel(op, start, seconds):
    return phases.Kernel(op, op, start, seconds)


ROLLOUT = Program(("a.1", "run_0/attention/multiply/dot"), ("a.2", "sampling/argmax"))
UPDATE = Program(("a.1", "gradient/transpose(jvp(f))/dot"), ("a.2", "optimizer/mul"), ("a.3", "score/exp"))
PACK = Program(("a.1", "quantize/round"))


def test_arithmetic_of_a_step():
    """Instruction names that programs share mean each program's own; gaps are wall time less busy time."""
    step = {"all": 10.0, "rollout": 4.0, "reward": 1.0, "update": 3.0, "pack": 1.5}
    taken = [step, step | {"all": 12.0, "rollout": 5.0}, step | {"all": 30.0, "update": 22.0}]
    row = cells.wall_figures(taken)
    assert (row["seconds"], row["seconds_least"], row["seconds_most"]) == (12, 10, 30)
    assert [row[f"wall/{name}"] for name in (*cells.WALL, "other")] == [4, 1, 3, 1.5, 1.5]  # others: .5, 1.5, 1.5
    found = {
        "rollout": [kernel("a.1", 0.0, 1.0), kernel("a.2", 1.0, 0.5), kernel("nvjet_x", 2.0, 0.25)],
        "update": [kernel("a.1", 0.0, 1.0), kernel("a.2", 0.5, 1.0), kernel("a.3", 3.0, 0.5)],  # two at once
        "pack": [kernel("a.1", 0.0, 0.5)],
    }
    row |= cells.traced_figures(found, {"rollout": ROLLOUT, "update": UPDATE, "pack": PACK}, taken)
    expected = {"rollout/dense GEMM": 1.25, "rollout/sampling": 0.5, "rollout/gaps": 2.25, "update/backward": 1.0}
    expected |= {"update/optimizer": 1.0, "update/score": 0.5, "update/gaps": 1.0, "pack/quantize": 0.5, "pack/gaps": 1}
    assert {k.removeprefix("phase/"): v for k, v in row.items() if k.startswith("phase/") and v} == expected
    assert row["unattributed/rollout"] == 0.25 and row["launches/update"] == 3 and row["busy/update"] == 2
    assert cells.traced_figures(found | {"pack": []}, {"rollout": ROLLOUT, "update": UPDATE}, taken) == {}

    shown = report.segments(row)
    assert list(shown)[0] == "rollout, attention" and list(shown)[-1] == "other"
    assert sum(shown.values()) == pytest.approx(4 + 1 + 3 + 1.5 + 1.5 + 0.5)  # .5: kernels at once are counted twice
    assert report.segments(cells.wall_figures(taken)) == {
        "rollout": 4,
        "reward": 1,
        "update": 3,
        "pack": 1.5,
        "other": 1.5,
    }

    row |= {"kind": "step", "variant": "QAT"}
    other = {"kind": "step", "variant": "QAT+grouped_mosaic"} | cells.wall_figures([step | {"all": 6.0}])
    text = report.markdown([row, other, {"kind": "step", "variant": "QAT+fp4_mosaic", "failed": "not compiled: K"}])
    assert "| QAT | 12000.00 | 10000.00 to 30000.00 | 1.00 | 4000.00 | 1000.00 | 3000.00 | 1500.00 | 1500.00 |" in text
    assert "| QAT+grouped_mosaic | 6000.00 | 6000.00 to 6000.00 | 2.00 |" in text and "failed: not compiled: K" in text
    assert "| QAT | 500.00 | 0.00 | 1000.00 | 0.00 | 0.00 | 0.00 | 1000.00 | 0.00 | 1000.00 | 3 |" in text  # the update
    entries = report.summary([row, other])
    assert (entries[1]["value"], entries[1]["peer"], entries[1]["ratio"]) == (6, 12, 0.5)


def test_what_quantizing_adds_is_judged_round_by_round():
    """A drift that doubles both sides leaves the share alone; sides take turns in both orders."""
    order = []

    def once(side):
        order.append(side)
        drift = 1 + len(order) // 2 % 2
        return drift * (1.1 if side == "W4A16" else 1.0) if len(order) % 4 else 0.0

    taken = cells.in_turns(once, ("BF16", "W4A16"), 2)
    assert order == ["W4A16", "BF16", "BF16", "W4A16"] * 2 and [len(v) for v in taken.values()] == [2, 2]
    row = cells.share_figures({"BF16": [1.0, 2.0, 4.0], "W4A16": [1.1, 2.2, 5.0]})
    assert row["share"] == pytest.approx(0.1) and row["share_p90"] == pytest.approx(0.1 + 0.8 * 0.15)
    assert (row["seconds/BF16"], row["seconds/W4A16"]) == (2.0, 2.2)
    row |= {"kind": "training", "variant": "blocked", "tokens": 9}
    assert "| blocked | 9 | 2000.00 | 2200.00 | +10.0% (+10.0% to +22.0%) |" in report.markdown([row])
    assert report.summary([row])[0]["ratio"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model="gpt"), "model='gpt' is not one of chain_sum, tiny"),
        (dict(variants=(), trainers=()), "variants and trainers are empty"),
        (dict(variants=("BF16", "BF16")), "variants=BF16,BF16 names one twice"),
        (dict(variants=("BF17",)), "unknown recipe 'BF17'"),
        (dict(variants=("BF16+mosaik",)), "names 'mosaik', which is none of trainer: reference, blocked"),
        (dict(variants=("BF16+grouped_mosaic+blocked",)), "two of the trainer, grouped_mosaic and blocked"),
        (dict(variants=("BF16+fp4_mosaic",)), "'BF16+fp4_mosaic': fp4_mosaic does not read weights stored as bfloat16"),
        (dict(variants=("NAIVE+direct_mosaic",)), "direct_mosaic does not read weights stored as nvfp4"),
        (dict(variants=("QUADS:0.5:online+continuous",)), "policy online chooses"),
        (dict(slots=4, variants=("BF16",)), "slots=4 has no effect"),
        (dict(slots=4096, variants=("BF16+continuous",)), "slots=4096 exceeds the 1024 rows"),
        (dict(prompts=3), "does not divide into update.minibatches=2"),
        (dict(steps=0), "steps=0 must be at least 1"),
        (dict(seed=-1, variants=()), "seed=-1 must be at least 0"),
        (dict(tokens=2**40), "tokens=1099511627776 must be at most"),
        (dict(tokens=8), "tokens=8 must be at least"),
        (dict(trainers=("fp4_mosaic",)), "trainers: 'fp4_mosaic' is not one of"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        step_time.check(dataclasses.replace(step_time.StepTimeConfig(), **change))


def test_what_is_measured_without_settings():
    planned = step_time.check(step_time.StepTimeConfig())
    assert [cell.key for cell in planned[:2]] == [("training", n) for n in ("blocked", "grouped_mosaic")]
    row, tokens = cells.PROTOTYPE_TASK.prompt_len + cells.PROTOTYPE_TASK.answer_len, planned[0].what["tokens"]
    assert 16384 - row < tokens <= 16384 and tokens % row == 0
    last = planned[-1]
    assert last.needs == ("fp4_mosaic",) and last.what["engine"] == "continuous"
