"""The task of a user's own file: what it reads, what it refuses and how its content is part of the config."""

import collections
import dataclasses
import hashlib
import json
import os

import numpy as np
import pytest

from quads_jax import config_tree
from quads_jax.config import TrainConfig, WarmStartConfig, changed_fields, from_json
from quads_jax.config_checks import check_train, check_warm_start
from quads_jax.tasks import Jsonl, Mixture
from quads_jax.tasks.base import split_of

PAIRS = [(f"{i}*3=", str(3 * i)) for i in range(100)]


def line(prompt, answer):
    return json.dumps({"prompt": prompt, "answer": answer})


def write(path, lines, end="\n"):
    path.write_bytes(b"".join((s if isinstance(s, bytes) else s.encode()) + end.encode() for s in lines))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "lines.jsonl", [line(*pair) for pair in PAIRS])


def drawn(task, split, n, seed=0, start=0):
    return [task.item(seed, split, i) for i in range(start, start + n)]


def test_every_pass_over_a_split_is_all_of_it_in_an_order_of_its_own(file):
    task = Jsonl(file=file)
    want = {split: {p for p, _ in PAIRS if split_of(p) == split} for split in ("train", "held_out")}
    for split, prompts in want.items():
        n = len(prompts)
        passes = [[item.prompt for item in drawn(task, split, n, start=n * k)] for k in range(3)]
        assert all(sorted(each) == sorted(prompts) for each in passes)
        if split == "train":  # the other has few enough items for two equal passes
            passes.append([item.prompt for item in drawn(task, split, n, seed=1)])
            assert len({tuple(each) for each in passes}) == 4
    assert all(dict(PAIRS)[item.prompt] == item.answer for item in drawn(task, "train", 50))


def test_first_places_are_uniform_over_seeds(file):
    """Chi-square of the item in place 0 over 4,000 seeds against equal chances; observed 69.0 with 94 degrees of
    freedom, of which 5 standard deviations are 68.6.
    """
    task = Jsonl(file=file)
    n = sum(split_of(p) == "train" for p, _ in PAIRS)
    seen = collections.Counter(task.item(seed, "train", 0).prompt for seed in range(4000))
    chi2 = sum((seen[p] - 4000 / n) ** 2 / (4000 / n) for p, _ in PAIRS if split_of(p) == "train")
    assert abs(chi2 - (n - 1)) < 5 * (2 * (n - 1)) ** 0.5


def test_share_that_is_held_out(file):
    hashes = {p: int.from_bytes(hashlib.sha256(p.encode()).digest(), "little") for p, _ in PAIRS}
    for one_in in (2, 3, 8):
        task = Jsonl(file=file, held_out_one_in=one_in)
        want = {p for p, h in hashes.items() if h % one_in == 0}
        assert {item.prompt for item in drawn(task, "held_out", len(want))} == want
        assert {item.prompt for item in drawn(task, "train", 100 - len(want))} == set(hashes) - want


def test_a_file_of_held_out_items(tmp_path, file):
    other = write(tmp_path / "other.jsonl", [line("long prompt", "x" * 20), line("é", "y")])
    task = Jsonl(file=file, held_out_file=other, extra_characters="é")
    assert {item.prompt for item in drawn(task, "train", 100)} == {p for p, _ in PAIRS}
    assert {item.prompt for item in drawn(task, "held_out", 2)} == {"long prompt", "é"}
    assert (task.prompt_len, task.answer_len) == (1 + 11, 20 + 1)
    assert task.tokenizer.vocab_size == 3 + 96 + 1


def test_lengths_are_measured_or_given(file):
    assert (Jsonl(file=file).prompt_len, Jsonl(file=file).answer_len) == (1 + 5, 3 + 1)
    wide = Jsonl(file=file, max_prompt=9, max_answer=7)
    assert (wide.prompt_len, wide.answer_len) == (10, 8)
    assert wide.prompts(0, "train", 0, 4)[0].shape == (4, 10)


def test_any_draw_is_an_item_of_the_file(file):
    rng = np.random.default_rng(0)
    task = Jsonl(file=file)
    assert {task.draw(rng).prompt for _ in range(2000)} == {p for p, _ in PAIRS}  # each missed with e^-20


def test_only_the_answer_itself_is_right(file):
    task = Jsonl(file=file)
    item = next(item for item in drawn(task, "train", 90) if item.answer == "12")
    near = ["", "12 ", " 12", "12\n", "+12", "012", "12.0", "１２", "12\x00", "1", "21", "twelve", "12,12"]
    assert task.reward([item] * 14, ["12", *near], [True] * 14).tolist() == [1.0] + [0.0] * 13
    assert task.reward([item], ["12"], [False]).tolist() == [0.0]


def test_line_ends_may_be_crlf_and_the_last_may_be_missing(tmp_path, file):
    crlf = write(tmp_path / "crlf.jsonl", [line(*pair) for pair in PAIRS], end="\r\n")
    open_end = tmp_path / "open.jsonl"
    open_end.write_text("\n".join(line(*pair) for pair in PAIRS))
    sets = [{dataclasses.astuple(i) for i in drawn(Jsonl(file=str(f)), "train", 100)} for f in (file, crlf, open_end)]
    assert sets[0] == sets[1] == sets[2] and len(sets[0]) == sum(split_of(p) == "train" for p, _ in PAIRS)


GOOD = [line("a", "b"), line("c", "d")]
REFUSED = {
    "empty line": (["", GOOD[1]], ":1 is not JSON"),
    "empty line in the middle": ([GOOD[0], "", GOOD[1]], ":2 is not JSON"),
    "not JSON": ([GOOD[0], "prompt,answer"], ":2 is not JSON"),
    "cut": ([GOOD[0], GOOD[1][:-3]], ":2 is not JSON"),
    "two objects": ([GOOD[0] + GOOD[1]], ":1 is not JSON.*Extra data"),
    "old line ends": ([GOOD[0] + "\r" + GOOD[1]], ":1 is not JSON.*Extra data"),
    "a list": ([GOOD[0], '["e", "f"]'], r":2 is \['e', 'f'\]: write an object of prompt and answer"),
    "text": ([GOOD[0], '"e"'], ":2 is 'e'"),
    "missing field": ([GOOD[0], '{"prompt": "e"}'], r":2 is \{'prompt': 'e'\}"),
    "extra field": ([GOOD[0], '{"prompt": "e", "answer": "f", "id": 1}'], ":2 is .*'id': 1"),
    "another case": (['{"Prompt": "e", "answer": "f"}'], ":1 is .*'Prompt'"),
    "repeated key": ([GOOD[0], '{"prompt": "e", "answer": "f", "answer": "g"}'], ":2 .*key 'answer' occurs twice"),
    "number": ([GOOD[0], '{"prompt": "e", "answer": 4}'], ":2: answer is 4: write text"),
    "null": (['{"prompt": null, "answer": "f"}'], ":1: prompt is None: write text"),
    "empty prompt": ([GOOD[0], line("", "f")], ":2: prompt is ''"),
    "blank answer": ([GOOD[0], line("e", " \n")], r":2: answer is ' \\n'"),
    "vocabulary": ([GOOD[0], line("é", "f")], r":2: prompt holds \['é'\].*extra_characters"),
    "NUL": ([GOOD[0], line("e", "f\0")], r":2: answer holds \['\\x00'\]"),
    "raw NUL": ([GOOD[0], b'{"prompt": "e\0", "answer": "f"}'], ":2 is not JSON"),
    "lone surrogate": ([GOOD[0], '{"prompt": "\\ud800", "answer": "f"}'], r":2: prompt holds \['\\ud800'\]"),
    "not UTF-8": ([GOOD[0], b'{"prompt": "\xff", "answer": "f"}'], ":2 is not JSON in UTF-8 .*0xff"),
    "byte order mark": ([b"\xef\xbb\xbf" + GOOD[0].encode()], ":1 is not JSON.*BOM"),
    "UTF-16": (["\n".join(GOOD).encode("utf-16")], ":1 is not JSON"),
    "NaN": ([GOOD[0], '{"prompt": "e", "answer": NaN}'], ":2 is not JSON.*NaN"),
    "deep": (["[" * 200_000], ":1 is not JSON.*nested"),
    "repeated prompt": ([*GOOD, line("a", "z")], ":3 repeats the prompt of .*:1: remove"),
    "empty file": ([], "is empty"),
    "no held-out item": ([line("c", "d")], "none of its 1 lines is a (train|held_out) item"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused_with_its_line(name, tmp_path):
    lines, message = REFUSED[name]
    path = write(tmp_path / "bad.jsonl", lines)
    with pytest.raises(ValueError, match="bad.jsonl.*" + message if message[0] != ":" else "bad.jsonl" + message):
        _ = Jsonl(file=path).prompt_len


def test_too_long_is_refused_with_its_line(file):
    with pytest.raises(ValueError, match="lines.jsonl:11: prompt has 5 characters, max_prompt is 4"):
        Jsonl(file=file, max_prompt=4).item(0, "train", 0)
    with pytest.raises(ValueError, match="lines.jsonl:35: answer has 3 characters, max_answer is 2"):
        Jsonl(file=file, max_answer=2).item(0, "train", 0)
    assert Jsonl(file=file, max_prompt=5, max_answer=3).item(0, "train", 0)


def test_a_held_out_item_that_is_trained_on_is_refused(tmp_path, file):
    leak = write(tmp_path / "leak.jsonl", [line("new", "1"), line("7*3=", "21")])
    with pytest.raises(ValueError, match="leak.jsonl:2 repeats the prompt of .*lines.jsonl:8, so that a held-out item"):
        Jsonl(file=file, held_out_file=leak).item(0, "held_out", 0)
    with pytest.raises(ValueError, match="so that a held-out item would be trained on"):
        Jsonl(file=file, held_out_file=file).item(0, "held_out", 0)


def test_bad_fields_are_refused(tmp_path, file):
    for changes, message in (
        ({"held_out_one_in": 1}, "held_out_one_in=1 is out of range"),
        ({"max_prompt": 0}, "max_prompt=0 is out of range"),
        ({"max_answer": 2**31}, "max_answer=2147483648 is out of range"),
        ({"held_out_one_in": 4, "held_out_file": file}, "held_out_one_in=4 has no effect"),
        ({"extra_characters": "éa"}, r"extra_characters repeats \['a'\]"),
        ({"extra_characters": "éé"}, r"extra_characters repeats \['é'\]"),
        ({"extra_characters": "\ufffd"}, "extra_characters repeats"),
        ({"file": str(tmp_path / "absent")}, "file='.*absent' is not there"),
        ({"file": str(tmp_path)}, "is not there or not a file"),
        ({"file": "/dev/zero"}, "'/dev/zero' is not there or not a file"),
        ({"file": "x" * 300}, "xxx' cannot be read: File name too long"),
        ({"held_out_file": "absent"}, "held_out_file='absent'"),
    ):
        with pytest.raises(ValueError, match=message):
            Jsonl(**{"file": file} | changes)
    for call in (lambda: Jsonl().item(0, "train", 0), lambda: check_train(TrainConfig(task=Jsonl()))):
        with pytest.raises(ValueError, match="file is empty: give one, by flags --set=task.file=FILE"):
            call()
    with pytest.raises(ValueError, match="unknown split 'test'"):
        Jsonl(file=file).item(0, "test", 0)
    with pytest.raises(ValueError, match="-3 is negative"):
        Jsonl(file=file).item(0, "train", -3)


def test_the_content_is_part_of_the_config(tmp_path, file):
    other = write(tmp_path / "other.jsonl", [line("x", "y")])
    config = TrainConfig(task=Jsonl(file=file, held_out_file=other))
    data = json.loads(json.dumps(config_tree.to_json(config)))
    with open(file, "rb") as opened:
        assert data["task"]["sha256"] == hashlib.sha256(opened.read()).hexdigest()
    assert from_json(TrainConfig, data) == config
    task = config_tree.override(config, f"task.file={other}").task
    assert task.sha256 == task.held_out_sha256 == data["task"]["held_out_sha256"]
    with open(file, "a") as opened:
        opened.write(line("new", "1") + "\n")
    now = TrainConfig(task=Jsonl(file=file, held_out_file=other))
    (changed,) = changed_fields(data, config_tree.to_json(now))
    assert changed.startswith(f"task.sha256: {data['task']['sha256']} before, ")
    assert config_tree.config_hash(now) != config_tree.config_hash(config)
    with pytest.raises(ValueError, match=r"task\.sha256 is .* now, not .*lines\.jsonl"):
        from_json(TrainConfig, data)
    with pytest.raises(ValueError, match="was changed after its hash was taken"):
        config.task.item(0, "train", 0)  # of the old content, which is no longer there
    os.remove(file)
    with pytest.raises(ValueError, match="task: jsonl: file=.*is not there"):
        from_json(TrainConfig, data)


def test_it_trains_and_mixes_like_any_task(tmp_path, file):
    check_train(TrainConfig(task=Jsonl(file=file)))
    warm = WarmStartConfig(task=Jsonl(file=file))
    check_warm_start(dataclasses.replace(warm, model=dataclasses.replace(warm.model, vocab_size=99)))
    with pytest.raises(ValueError, match="the task's tokenizer has 99 ids"):
        check_warm_start(warm)
    other = write(tmp_path / "other.jsonl", [line(f"{i}+1=", str(i + 1)) for i in range(50)])
    mixture = Mixture((Jsonl(file=file), Jsonl(file=other)))
    assert len(set(mixture.labels)) == 2
    assert {item.prompt[-2] for item in drawn(mixture, "train", 50)} == {"3", "1"}
