"""Hostile input, 1,000 of it: every piece is refused by a ValueError that names it, or means what it says.

What an input says is read a second time by `tests/second_reading.py`. Inputs come from fixed seeds; a failure shows the
input.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import random
import re
import typing

import jax
import pytest

from quads_jax import config_tree
from quads_jax.checkpoints import MANIFEST, Checkpoints, RunFolderError, load_weights, read_json, save_weights
from quads_jax.config import EvaluateConfig, TrainConfig, WarmStartConfig, from_json, read_config
from quads_jax.config_checks import check_evaluate, check_train, check_warm_start
from quads_jax.metrics import read_metrics
from quads_jax.models.decoder import init_params
from quads_jax.tasks import Jsonl
from tests.second_reading import REFUSED, meaning, only_json, real, same, whole
from tests.tiny import MODEL

COUNTS = {"overrides": 400, "configs": 200, "checks": 150, "tasks": 150, "weights": 40, "metrics": 30, "manifests": 30}
CONFIGS = {TrainConfig: check_train, WarmStartConfig: check_warm_start, EvaluateConfig: check_evaluate}


def test_a_thousand():
    assert sum(COUNTS.values()) == 1000


def refusal(call):
    """(what `call` gives, None) or (None, the message of its ValueError); anything else it raises is a fault."""
    try:
        return call(), None
    except ValueError as error:
        message = str(error)
        assert type(error) in (ValueError, RunFolderError), repr(error)  # no UnicodeError, no JSONDecodeError
        assert len(message) < 6000 and message.replace("\n  ", "").isprintable(), message
        return None, message


# Texts ----------------------------------------------------------------------------------------------------------------

HOSTILE = [
    "", " ", "0", "1", "2", "-1", "+3", "--3", " 3", "3 ", "3\n", "\t3", "１２", "٣", "½", "²", "1_000", "1,000", "007",
    "-0", "0x10", "0b1", "1e3", "1.0", "1.", ".5", ".", "1e", "e5", "1e400", "-1e400", "1e-400", "5e-324", "2e-324",
    "1e+5", "1E5", "1e1_0", "1e-05", "+-1", "-0.0", "0.1", "9007199254740993", "2147483648", "4294967296",
    "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "nan", "NaN", "-nan", "inf", "Infinity", "-inf", "none", "None",
    "null", "nil", "true", "True", "TRUE", "yes", "on", "false", "False", "no", "off", "1/2", "50%", "1j", "0.5.1",
    "$(id)", "`id`", "{}", "[]", "[1]", "(1,)", "1,", ",1", ",", "1,,2", "1;2", "😀", "\u200b1", "\ufeff1", "'1'",
    '"1"', "9" * 50, "9" * 5000, "0" * 5000, "0." + "0" * 400 + "1", "x" * 100_000, "1," * 500 + "1",
    "../../x", "~", "%s", "{0}", "QUADS", "BF16", "experts,experts", "experts", "block", "ppo_clip", "float64",
    "float32", '{"name": "BF16"}',
]  # fmt: skip
UNPRINTABLE = ["a\0b", "a\nb", "\x1b[31m", "\udcff", "\ud83d\ude00", "a\x7f", "x" * 4097]


def typos(rng, path):
    """A path that is not `path`."""
    at = rng.randrange(len(path))
    return rng.choice([
        path[:at] + path[at + 1 :], path[:at] + rng.choice("xX._ \0é") + path[at:], path.upper(), path.swapcase(),
        path + ".", "." + path, path + ".x", path + "[0]", path.replace(".", "..") + ".",
        path.rpartition(".")[2] + ".real", path.split(".")[0] + ".__class__", ".".join([path] * 3), "", "__dict__",
        "ｓteps", "x" * 50_000,
    ])  # fmt: skip


def annotations(config, prefix=""):
    """{path: annotation} of all leaves."""
    hints, found = typing.get_type_hints(type(config)), {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        found |= annotations(value, f"{prefix}{field.name}.") if nested else {prefix + field.name: hints[field.name]}
    return found


def get(config, path):
    return functools.reduce(getattr, path.split("."), config)


def named(message, *pieces):
    """Whether one of the pieces is in the message, as it is or as Python writes or shortens it."""
    forms = [
        form for piece in map(str, pieces) for form in (piece or "''", repr(piece)[1:-1] or "''", repr(piece)[1:50])
    ]
    return any(form in message for form in forms)


def overrides():
    """(config, path, text): all leaves in turn, first with what they hold, then with hostile text and misspelt."""
    rng = random.Random(1)
    leaves = [(cls(), path) for cls in CONFIGS for path in annotations(cls())]
    for i, (config, path) in enumerate(itertools.islice(itertools.cycle(leaves), COUNTS["overrides"])):
        value = get(config, path)
        if i < len(leaves):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield config, path, text.lower() if value is None or isinstance(value, bool) else text
        else:
            near = "".join(rng.choices("0123456789+-eE._ ,", k=rng.randint(1, 8)))
            text = rng.choice(
                UNPRINTABLE if isinstance(value, str) and rng.random() < 0.3 else [*HOSTILE, *[near] * 60]
            )
            yield config, typos(rng, path) if rng.random() < 0.15 else path, text


def test_overrides():
    accepted = refused = 0
    for config, path, text in overrides():
        shown = (type(config).__name__, path[:80], text[:80])
        known = annotations(config)
        want = meaning(known[path], text) if path in known else REFUSED
        new, message = refusal(lambda c=config, p=path, t=text: config_tree.override(c, f"{p}={t}"))
        if message is not None:
            refused += 1
            assert named(message, path, path.rpartition(".")[2], text), (shown, message)
            alone = want is not REFUSED and want == get(config, path)
            assert not alone, (shown, message)  # what a config holds can be said
            continue
        accepted += 1
        got = get(new, path)
        assert want is not REFUSED and got == want and type(got) is type(want), (shown, got, want)
        assert not isinstance(got, float) or math.copysign(1, got) == math.copysign(1, got + 0.0), shown
        others = {p: get(new, p) for p in known if p != path}
        assert others == {p: get(config, p) for p in others}, shown
        data = json.loads(json.dumps(config_tree.to_json(new), allow_nan=False))
        assert from_json(type(config), data) == new, shown
        refusal(lambda n=new: CONFIGS[type(n)](n))
    assert accepted > 100 and refused > 150, (accepted, refused)


def test_the_second_reading_of_numbers_agrees_with_pythons_where_both_accept():
    rng = random.Random(2)
    for text in [*HOSTILE, *("".join(rng.choices("0123456789+-e.", k=6)) for _ in range(500))]:
        for mine, theirs in ((whole, int), (real, float)):
            if (value := mine(text)) is not REFUSED:
                assert value == theirs(text), text
    assert [whole(t) for t in ("0", "-7", "+3")] == [0, -7, 3] and real("-1.5e-3") == -0.0015 and real(".5") == 0.5
    assert {REFUSED} == {real(t) for t in ("", ".", "1e", "1e400", "1_0", "１", "nan", "--1", "+-1", "1e-400")}


# Configs in files -----------------------------------------------------------------------------------------------------

ODD = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, "", "1", "none", "true", "x" * 5000,
    "\0", "\ud800", [], {}, [1], ["a"], [[]], {"name": "chain_sum"}, {"name": []}, {"a": 1}, [None],
]  # fmt: skip
RAW = [
    "NaN", "Infinity", "-Infinity", "1e400", "1e-400", "-1e999", "9" * 5000, "1_0", "01", "+1", ".5",
    "'a'", "undefined", "1,", "[" * 5000, '{"a": 1, "a": 1}', "\x00", "\\u0000", "0x1", "True", "None",
    '"' + "x" * (2**20 + 1) + '"',
]  # fmt: skip


def places(data, prefix=()):
    """The paths of everything below `data`."""
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        yield (*prefix, key)
        yield from places(value, (*prefix, key))


def mutate(rng, data):
    """(the bytes of a mutated JSON form, words of which a refusal must hold one)."""
    data = json.loads(json.dumps(data))
    *above, key = rng.choice(list(places(data)))
    parent = functools.reduce(lambda d, k: d[k], above, data)
    name = str(key)
    kind = rng.choice("value value quote delete add rename nest swap raw raw twice cut bytes root".split())
    words = [name, ".".join(map(str, (*above, key)))]
    if kind == "value":
        parent[key] = rng.choice([10**30, 2**53 + 1, 1, "0.5"] if isinstance(parent[key], float) else ODD)
    elif kind == "quote":
        parent[key] = str(parent[key])
    elif kind == "delete":
        del parent[key]
        words += map(str, above)
    elif kind in ("add", "rename") and isinstance(parent, dict):
        new = rng.choice(["extra", name + "s", name.upper(), "", "__class__", "é", "x" * 3000])
        parent[new] = parent.pop(key) if kind == "rename" else 1
        words.append(new)
    elif kind == "nest":
        parent[key] = rng.choice([[parent[key]], {name: parent[key]}])
    elif kind == "swap":
        parent[key] = json.loads(json.dumps(data))
    text = json.dumps(data)
    if kind == "raw":
        parent[key] = "@@"
        raw = rng.choice(RAW)
        text = json.dumps(data).replace('"@@"', raw)
        words += [raw, "JSON", "column", "bytes", "nested", "occurs twice"]
    elif kind == "twice" and isinstance(parent, dict):
        inner = json.dumps(parent)
        text = json.dumps(data).replace(inner, inner[:-1] + f", {json.dumps(key)}: {json.dumps(parent[key])}}}", 1)
    elif kind == "cut":
        text = text[: rng.randrange(len(text))]
        words += ["column"]
    elif kind == "bytes":
        at = rng.randrange(len(text))
        broken = text.encode()[:at] + rng.choice([b"\xff", b"\x00", b"\xc3", b"\xef\xbb\xbf"]) + text.encode()[at:]
        return broken, [*words, "position", "column", "unknown keys", "control character", "name", "one of"]
    elif kind == "root":
        text = rng.choice(
            ["", "[]", "1", '"x"', "null", "{}", "[" * 10_000, "{" * 9, " " * 100, text + text, text + "]"]
        )
        words += ["column", "nested", "Config"]
    return text.encode(), words


def test_config_files(tmp_path):
    rng = random.Random(3)
    path = tmp_path / "config.json"
    accepted = 0
    for cls in itertools.islice(itertools.cycle(CONFIGS), COUNTS["configs"]):
        data, words = mutate(rng, config_tree.to_json(cls()))
        path.write_bytes(data)
        config, message = refusal(lambda c=cls: read_config(c, path))
        if message is not None:
            assert str(path) in message and named(message.replace(str(path), ""), *words), (data[:3000], words, message)
            continue
        accepted += 1
        stated = only_json(data)
        assert stated is not REFUSED and same(cls, stated, config), data
        assert from_json(cls, config_tree.to_json(config)) == config, data
        refusal(lambda c=config: CONFIGS[type(c)](c))
    assert 5 < accepted < COUNTS["configs"] // 2, accepted


def test_config_files_that_are_none(tmp_path):
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (2**20 + 1))
    none = {tmp_path: "not a file", "absent": "not there", "/dev/zero": "not a file", "x" * 300: "too long"}
    for path, part in (none | {"": "not a file", large: "1048577 bytes", "a\0b": "not there"}).items():
        _, message = refusal(lambda p=path: read_config(TrainConfig, p))
        assert part in message and named(message, path), (path, message)
    for cls, other in itertools.permutations(CONFIGS, 2):
        (tmp_path / "other.json").write_text(json.dumps(config_tree.to_json(other())))
        _, message = refusal(lambda c=cls: read_config(c, tmp_path / "other.json"))
        assert f"other.json': {cls.__name__}: unknown keys [" in message
    for cls in CONFIGS:
        (tmp_path / "good.json").write_text(json.dumps(config_tree.to_json(cls())))
        assert read_config(cls, tmp_path / "good.json") == cls()


# Checks of well-typed values ------------------------------------------------------------------------------------------

EXTREMES = {
    int: [0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 1000],
    float: [0.0, 1.0, -1.0, 0.5, 2.0, 5e-324, 1e-300, 1e-30, 1e30, 1.7e308, -1e308, 0.9999999999999999, 1 + 2**-52],
    str: ["", ".", "/", "..", "x" * 5000, "é", "none", "QUADS", "BF16", "QUADS:", "QUADS:x", "QUADS:2",
          "QUADS:nan", ":"],
    bool: [True, False],
}  # fmt: skip


def extreme(rng, annotation):
    arguments = typing.get_args(annotation)
    if type(None) in arguments:
        return rng.choice([None, extreme(rng, arguments[0])])
    if typing.get_origin(annotation) is tuple:
        return tuple(extreme(rng, arguments[0]) for _ in range(rng.choice([0, 1, 2, 2, 50])))
    return rng.choice(EXTREMES[annotation])


def test_checks_of_extreme_values():
    """One or two well-typed values at a time: made and checked, or refused by name; what is left can be traced."""
    rng = random.Random(4)
    for cls in itertools.islice(itertools.cycle(CONFIGS), COUNTS["checks"]):
        leaves = annotations(cls())
        paths = rng.sample(sorted(leaves), rng.choice([1, 1, 2]))
        values = [extreme(rng, leaves[path]) for path in paths]

        def make(cls=cls, paths=paths, values=values):
            config = cls()
            for path, value in zip(paths, values, strict=True):
                config = config_tree.override(config, path, value)
            CONFIGS[cls](config)
            return config

        config, message = refusal(make)
        if message is None:
            assert sized(config), (cls.__name__, paths, values)
        else:
            pieces = [*paths, *(path.rpartition(".")[2] for path in paths), *values]
            pieces += [part for value in values if isinstance(value, tuple) for part in value]
            assert named(message, *pieces), (cls.__name__, paths, values, message)


def sized(config):
    """Whether JAX can hold the seeds as they are and the optimizer's numbers in float32."""
    seeds = [get(config, path) for path in annotations(config) if path.endswith("seed")]
    exact = all(0 <= seed < 2**32 for seed in seeds)
    optim = getattr(config, "optim", None)
    if optim is None:
        return exact
    b1, b2, rate, eps = (float(jax.numpy.float32(x)) for x in (optim.b1, optim.b2, optim.learning_rate, optim.eps))
    return exact and b1 < 1 and b2 < 1 and 0 < rate < math.inf and eps > 0


OUT_OF_RANGE = {
    TrainConfig: "seed=4294967296 seed=-1 steps=0 rollout.temperature=1e-30 rollout.temperature=1e+30 "
    "rollout.prompts=0 rollout.prompts=-4 update.clip_high=1e+30 optim.learning_rate=1e+30 optim.learning_rate=1e-60 "
    "optim.eps=1e-40 optim.b2=0.9999999 recipe.refresh_every=-1 eval.every=0 eval.seed=-1",
    WarmStartConfig: "seed=-1 batch=0 final_prompts=0 model.layers=1000000 model.rope_theta=0.0 balance_weight=-1.0",
    EvaluateConfig: "temperature=0.0 samples=0 seed=4294967296 rows=2147483648",
}
UNFIT = {
    TrainConfig: {
        "rollout.max_new_tokens=0": "rollout: max_new_tokens=0",
        "rollout.max_new_tokens=2147483647": "more than 2147483647 tokens",
        "rollout.temperature=0": "rollout: temperature=0",
        "rollout.group_size=1": "rollout.group_size=1",
        "recipe.ratio=1.5": "recipe: residual ratio 1.5 is not in [0, 1]",
        "recipe.dtype=float16": "recipe: compute dtype 'float16' is not one of",
        "recipe.roles=": "recipe: roles is empty",
        "init=": "init='' names no file",
        "init=/": "init='/' names no file",
        "min_start=2": "min_start=2.0",
        "optim.learning_rate=0": "optim: learning_rate=0.0",
    },
    WarmStartConfig: {
        "batch=2147483647": "batch=2147483647 rows of 23 tokens are more than 2147483647 tokens",
        "target=0": "target=0.0",
        "model.dense_layers=0,0": "model.dense_layers=(0, 0) names a layer twice",
        "model.heads=3": "model: heads=3",
    },
    EvaluateConfig: {
        "ks=2,2": "ks=(2, 2) names a number twice",
        "recipes=": "recipes is empty",
        "recipes=QUADS:2": "recipes: 'QUADS:2': residual ratio 2.0",
        "prompts=2147483647": "prompts=2147483647 x samples=8",
    },
}


def test_checks_name_path_value_and_range():
    def message(cls, text):
        return refusal(lambda: CONFIGS[cls](config_tree.override(cls(), text)))[1]

    for cls, check in CONFIGS.items():
        check(cls())
        for text in OUT_OF_RANGE[cls].split():
            found = message(cls, text)
            assert re.search(re.escape(text) + " must be at least .* and at most .*", found), (text, found)
        for text, part in UNFIT[cls].items():
            assert part in message(cls, text), (text, message(cls, text))


# Task files -----------------------------------------------------------------------------------------------------------

LINES = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(40)]


def mutate_lines(rng):
    lines = [line.encode() for line in LINES]
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(lines))
        entry = {"prompt": f"{at}+1=", "answer": str(at + 1)}
        kind = rng.choice("value key drop raw flip flip insert cut repeat swap ending fine".split())
        if kind == "value":
            entry[rng.choice(["prompt", "answer"])] = rng.choice([*ODD[:-9], "é", " \n", "a\nb", "\u2028", "1" * 5000])
        elif kind == "key":
            entry[rng.choice(["Prompt", "task", "", "answer "])] = "1"
        elif kind == "drop":
            del entry[rng.choice(["prompt", "answer"])]
        if kind in ("value", "key", "drop"):
            lines[at] = json.dumps(entry).encode()
        elif kind == "raw":
            lines[at] = rng.choice(RAW[:-1]).encode()
        elif kind == "flip":
            where = rng.randrange(len(lines[at]))
            lines[at] = lines[at][:where] + bytes([rng.randrange(256)]) + lines[at][where + 1 :]
        elif kind == "insert":
            lines[at] += rng.choice(
                [b"\x00", b"\r", b" ", b"\n", b"\xff", b",", b"{}", b"\xe2\x80\xa8", b"\n\n", b"\x0b", b"\x85"]
            )
        elif kind == "cut":
            lines[at] = lines[at][: rng.randrange(len(lines[at]))]
        elif kind == "repeat":
            lines.insert(at, lines[at])
        elif kind == "swap":
            lines[at] = json.dumps(
                {"answer": entry["answer"], "prompt": entry["prompt"]}, indent=rng.choice([None, None, 1])
            ).encode()
        elif kind == "ending":
            lines = [line + b"\r" for line in lines]
    return b"\n".join(lines) + rng.choice([b"", b"\n", b"\n"])


def bad_line(data):
    """The number of the first line that is no good item, by `only_json` and what the task promises; None: all are."""
    prompts = set()
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        entry = only_json(line)
        good = isinstance(entry, dict) and set(entry) == {"prompt", "answer"}
        for text in entry.values() if good else ():
            good &= isinstance(text, str) and bool(text.strip()) and all(c == "\n" or " " <= c <= "~" for c in text)
        if not good or entry["prompt"] in prompts:
            return number
        prompts.add(entry["prompt"])
    return None


def test_task_files(tmp_path):
    rng = random.Random(5)
    accepted = 0
    for i in range(COUNTS["tasks"]):
        path = tmp_path / f"{i}.jsonl"
        data = mutate_lines(rng)
        path.write_bytes(data)
        task = Jsonl(file=str(path))
        length, message = refusal(lambda t=task: t.prompt_len)
        bad = bad_line(data)
        if message is not None:
            assert bad is not None and message.startswith(f"{path}:{bad}"), (data, bad, message)
            continue
        accepted += 1
        assert bad is None, (data, bad)
        stated = {(e["prompt"], e["answer"]) for e in map(json.loads, data.strip().split(b"\n"))}
        items = [task.item(0, split, k) for split in ("train", "held_out") for k in range(40)]
        assert {(item.prompt, item.answer) for item in items} == stated
        assert length == 1 + max(len(prompt) for prompt, _ in stated)
    assert 20 < accepted < COUNTS["tasks"] - 50, accepted


# What a run leaves on disk --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.msgpack"
    abstract = jax.eval_shape(lambda key: init_params(MODEL, key), jax.random.key(0))
    zeros = jax.tree.map(lambda a: jax.numpy.zeros(a.shape), abstract)
    save_weights(path, zeros, MODEL, {"steps": 3, "figures": {"target": 0.5, "tasks": {"a": {"pass@1": 0.75}}}})
    return path


def test_weights_descriptions(weights):
    """The hash covers all that the JSON says: only another spelling of the same is accepted."""
    description = weights.with_suffix(".json")
    whole_text = description.read_bytes()
    rng, good = random.Random(6), json.loads(whole_text)
    for _ in range(COUNTS["weights"]):
        data, _ = mutate(rng, good)
        description.write_bytes(data)
        found, message = refusal(lambda: load_weights(weights))
        if message is None:
            assert only_json(data) == good, data[:2000]
        else:
            assert str(weights.parent) in message, (data[:2000], message)
    description.write_bytes(whole_text)
    assert load_weights(weights)[1] == MODEL


def test_metrics_files(tmp_path):
    rng = random.Random(7)
    row = {"kind": "train", "step": 3, "reward": 0.5, "gap/max": "nan", "extra": None}
    path = tmp_path / "metrics.jsonl"
    for _ in range(COUNTS["metrics"]):
        data = mutate(rng, row)[0].replace(b"\n", b" ")
        path.write_bytes(json.dumps(row).encode() + b"\n" + data + b"\n" + json.dumps(row).encode() + b"\n")
        rows, message = refusal(lambda: read_metrics(path))
        stated = only_json(data)
        if message is None:
            assert isinstance(stated, dict) and len(rows) == 3, data[:2000]
            special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
            want = {k: special.get(v, v) if isinstance(v, str) else v for k, v in stated.items()}
            assert repr(rows[1]) == repr(want), data[:2000]
        else:
            assert not isinstance(stated, dict) and f"{path}:2" in message, (data[:2000], message)


def test_manifests(tmp_path):
    """A mutated manifest makes the checkpoint a damaged one, whatever it says; only the same data is accepted."""
    rng, folder = random.Random(8), tmp_path / "4"
    folder.mkdir()
    (folder / "state").write_bytes(b"1234")
    body = {
        "format": 1,
        "about": {"run": {"step": 0}, "seconds": 1.5},
        "files": {"state": hashlib.sha256(b"1234").hexdigest()},
    }
    good = {"sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest(), **body}
    for i in range(COUNTS["manifests"]):
        data = mutate(rng, good)[0] if i else json.dumps(good).encode()
        (folder / MANIFEST).write_bytes(data)
        checkpoints, message = refusal(lambda: Checkpoints(tmp_path, keep=2))
        assert message is None, (data[:2000], message)
        if checkpoints.whole:
            assert only_json(data) == good and checkpoints.whole == {4: body["about"]}, data[:2000]
        else:
            assert list(checkpoints.damaged) == [4], data[:2000]


def test_brackets_of_any_depth(weights, tmp_path):
    """Around the depth at which Python's parser gives up: never a RecursionError, in the parser or after it."""
    description = weights.with_suffix(".json")
    whole_text = description.read_bytes()
    folder = tmp_path / "4"
    folder.mkdir()
    for depth, (left, inner, right) in itertools.product(
        [*range(900, 1000, 3), 10_000], [(b"[", b"", b"]"), (b'{"a":', b"0", b"}")]
    ):
        deep = left * depth + inner + right * depth
        row = b'{"x": %s}' % deep
        description.write_bytes(whole_text.replace(b"{", b'{"x": %s,' % deep, 1))
        for path, text, load in (
            (description, description.read_bytes(), lambda: load_weights(weights)),
            (tmp_path / "config.json", row, lambda: read_json(tmp_path / "config.json")),
            (tmp_path / "metrics.jsonl", row + b"\n", lambda: read_metrics(tmp_path / "metrics.jsonl")),
            (folder / MANIFEST, row, lambda: Checkpoints(tmp_path, keep=2).damaged[4]),
            (tmp_path / "list.jsonl", deep + b"\n", lambda: read_metrics(tmp_path / "list.jsonl")),
            (tmp_path / "config.json", deep, lambda: load_weights(tmp_path)),
        ):
            path.write_bytes(text)
            _, message = refusal(load)
            assert message is None or str(path.parent) in message, (depth, left, message)
            assert message is not None or path != description, (depth, left)  # the hash covers it
            if depth == 10_000 and path.name != MANIFEST:
                assert re.search("nested too deeply|recursion depth", message), message
    description.write_bytes(whole_text)


def test_this_file_reads_json_as_the_library_does_where_both_accept():
    rng = random.Random(9)
    good = config_tree.to_json(TrainConfig())
    both = 0
    for _ in range(100):
        data, _ = mutate(rng, good)
        if (mine := only_json(data)) is not REFUSED:
            both += 1
            assert mine == json.loads(data), data
    assert both > 30, both
