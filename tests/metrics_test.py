import io
import json
import math
import struct
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quads_jax.metrics import MetricsWriter, Progress, cut_back, duration, read_metrics


def test_rows_come_back_as_plain_python(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"kind": "train", "step": np.int64(3), "a": np.float32(0.5), "b": jnp.float32(0.25),
                      "c": jnp.bfloat16(2), "d": jnp.int32(7), "e": np.bool_(True), "f": None, "g": False})
    row = {"kind": "train", "step": 3, "a": 0.5, "b": 0.25, "c": 2.0, "d": 7, "e": True, "f": None, "g": False}
    (read,) = read_metrics(path)
    assert read == row and {key: type(value) for key, value in read.items()} == {k: type(v) for k, v in row.items()}


def test_non_finite_floats_are_valid_json_and_come_back_as_floats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"a": math.nan, "b": np.float32(np.inf), "c": jnp.float32(-jnp.inf)})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"a": "nan", "b": "inf", "c": "-inf"}
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_every_row_is_on_disk_at_once_and_a_new_writer_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter(path)
    first.write({"step": 0})
    assert read_metrics(path) == [{"step": 0}]  # not closed yet
    first.close()
    with MetricsWriter(path) as second:
        second.write({"step": 1})
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]


def test_a_half_written_last_line_is_left_out_and_overwritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(path) == [{"step": 0}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 1})
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]


def test_zero_has_no_sign(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"a": -0.0, "b": np.float32(-0.0)})
    assert path.read_text() == '{"a": 0.0, "b": 0.0}\n'


BROKEN = ['{"step": 1, "rew', "3", '{"a": 1, "a": 1}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e400}',
          '{"a": "\xff"}', '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "[" * 600 + "]" * 600]  # fmt: skip


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match="metrics.jsonl:2"):
        read_metrics(path)


@pytest.mark.parametrize("value", [np.zeros(2), jnp.zeros((1,)), [1], {"a": 1}, object(), "nan"])
def test_what_is_no_scalar_is_refused_by_name_and_writes_nothing(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer, pytest.raises(ValueError, match="'gap/mean'"):
        writer.write({"step": 1, "gap/mean": value})
    assert path.read_text() == ""


def test_a_traced_value_is_refused(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer, pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda x: writer.write({"x": x}))(1.0)


HEADER = {"kind": "run", "step": 0, "id": "mine"}
RUN = [HEADER, {"kind": "eval", "step": 0}]
for _step in (1, 2, 3):
    RUN += [{"kind": "train", "step": _step}, {"kind": "eval", "step": _step}]


def written(path, rows, torn=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return path


@pytest.mark.parametrize("step, kept", [(None, 0), (0, 2), (1, 4), (2, 6), (3, 8)])
@pytest.mark.parametrize("torn", ["", '{"kind": "tr', '{"kind": "train", "step": 4}'])
def test_a_file_is_cut_back_to_whole_steps(tmp_path, step, kept, torn):
    path = written(tmp_path / "metrics.jsonl", RUN, torn)
    cut_back(path, HEADER, step)
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in RUN[:kept])


@pytest.mark.parametrize(
    "rows, step, message",
    [
        ([HEADER | {"id": "another"}, *RUN[1:]], 2, "is another run's: it begins with .*another.*mine.*put back"),
        ([HEADER | {"id": "another"}, *RUN[1:]], None, "is another run's"),
        (RUN[1:], 2, "is another run's"),
        ([row for row in RUN if row != {"kind": "train", "step": 1}], 2, "has 1 of the 2 steps"),
        ([*RUN[:4], *RUN[2:]], 2, "has 3 of the 2 steps"),
        (RUN[:4], 2, "has 1 of the 2 steps before the checkpoint"),
        ([], 2, "has 0 of the 2 steps"),
    ],
)
def test_another_runs_file_and_lost_steps_are_refused(tmp_path, rows, step, message):
    path = written(tmp_path / "metrics.jsonl", rows, "torn")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        cut_back(path, HEADER, step)
    assert path.read_bytes() == before


def test_a_run_that_wrote_no_metrics_has_nothing_to_cut(tmp_path):
    cut_back(tmp_path / "metrics.jsonl", HEADER, None)
    with pytest.raises(ValueError, match="has 0 of the 1 steps"):
        cut_back(tmp_path / "metrics.jsonl", HEADER, 1)


class Stream(io.StringIO):
    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def progress(tty, total=10):
    stream, clock = Stream(tty), Clock()
    return Progress(total, "QUADS seed 0", stream, clock=clock), stream, clock


def test_progress_shows_figures_rate_and_time_left():
    bar, stream, clock = progress(tty=False)
    bar.update(1, reward=0.51239, gap=1.5e-5)  # compilation lies before it: no rate yet
    clock.now += 8
    bar.update(3, reward=0.6)
    clock.now += 6
    bar.update(10, reward=0.7)
    assert stream.getvalue().splitlines() == [
        "QUADS seed 0  1/10  reward 0.5124  gap 1.5e-05",
        "QUADS seed 0  3/10  reward 0.6  4.00 s/step  ETA 0:28",  # 8 s for 2 steps; 7 are left
        "QUADS seed 0  10/10  reward 0.7  1.56 s/step  ETA 0:00",  # 14 s for 9
    ]


def test_progress_prints_at_most_every_interval_and_the_end():
    bar, stream, clock = progress(tty=False, total=100)
    for step in range(1, 101):
        bar.update(step)
        clock.now += 0.125
    bar.finish()
    bar.finish()
    lines = stream.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == ["1/100", "41/100", "81/100", "100/100"]
    assert lines[1].split("  ")[2:] == ["8.0 steps/s", "ETA 0:07"]  # 59 steps at 8 a second


def test_progress_rewrites_one_line_on_a_terminal():
    bar, stream, clock = progress(tty=True)
    for step in (1, 2):
        bar.update(step)
        clock.now += 0.1
    bar.finish()
    assert stream.getvalue() == (
        "\rQUADS seed 0  1/10\x1b[K\rQUADS seed 0  2/10  10.0 steps/s  ETA 0:01\x1b[K\n")


def test_progress_cuts_the_line_to_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    bar, stream, _ = progress(tty=True)
    bar.update(1)
    assert stream.getvalue() == "\rQUADS seed \x1b[K"


def test_progress_of_a_resumed_run_counts_its_own_steps():
    bar, stream, clock = progress(tty=False)
    bar.update(6)
    clock.now += 10
    bar.update(8)
    assert stream.getvalue().splitlines()[-1].endswith("5.00 s/step  ETA 0:10")


def test_finish_without_an_update_prints_nothing():
    for tty in (False, True):
        bar, stream, _ = progress(tty)
        bar.finish()
        assert stream.getvalue() == ""


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"),
                                           (36061, "10:01:01")])
def test_duration(seconds, text):
    assert duration(seconds) == text


# TensorBoard ----------------------------------------------------------------------------------------------------------


def crc32c(data):
    """Bit by bit, polynomial 0x1EDC6F41 reflected (RFC 3720)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(data):
    """(number, value) of a protobuf message: an int, or the bytes of the other wire types."""
    at, found = 0, []

    def varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            found.append((key >> 3, data[at : at + size]))
            at += size
    return found


def scalars(folder):
    """[(step, {tag: f32})] of the folder's one event file, by TensorBoard's published formats alone."""
    (path,) = folder.glob("*tfevents*")
    data, at, events = path.read_bytes(), 0, []
    while at < len(data):
        length, check = struct.unpack_from("<QI", data, at)
        assert check == masked(data[at : at + 8])
        message = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked(message),)
        events.append(dict(fields(message)))
        at += 16 + length
    assert events[0][3] == b"brain.Event:2"
    assert all(abs(struct.unpack("<d", event[1])[0] - time.time()) < 60 for event in events)
    out = []
    for event in events[1:]:
        values = [dict(fields(value)) for _, value in fields(event[5])]
        out.append((event.get(2, 0), {v[1].decode(): struct.unpack("<f", v[2])[0] for v in values}))
    return out


ROWS = [
    {"kind": "run", "step": 0, "config_hash": "abc"},
    {"kind": "eval", "step": 0, "precision": "rollout", "pass@1": 0.25, "n": 16},
    {"kind": "train", "step": 1, "reward": 0.5, "gap/mean": 1e-3, "loss": math.inf, "refreshed": None, "ok": True},
    {"kind": "train", "step": 300, "reward": 0.1},
]
SCALARS = [
    (0, {}),
    (0, {"eval/rollout/pass@1": 0.25, "eval/rollout/n": 16.0}),
    (1, {"reward": 0.5, "gap/mean": float(np.float32(1e-3)), "loss": math.inf}),
    (300, {"reward": float(np.float32(0.1))}),
]


def test_the_checksum_here_is_right():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C


def test_tensorboard_sees_every_row_at_once(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for i, row in enumerate(ROWS):
            writer.write(row)
            assert scalars(tmp_path) == SCALARS[: i + 1]


def test_a_resume_writes_tensorboards_file_again_and_no_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for row in ROWS:
            writer.write(row)
    (before,) = tmp_path.glob("*tfevents*")
    (tmp_path / "events.out.tfevents.1.other").write_bytes(b"of a killed run")
    keep = path.read_bytes().splitlines(keepends=True)[:3]
    path.write_bytes(b"".join(keep) + b'{"torn')
    with MetricsWriter(path) as writer:
        assert scalars(tmp_path) == SCALARS[:3] and not before.exists()
        writer.write(ROWS[3])
    assert scalars(tmp_path) == SCALARS


def test_a_run_goes_on_without_tensorboards_file(tmp_path, caplog):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(ROWS[0])
    writer._events._file.close()
    writer._events._file = open("/dev/full", "wb")  # every write to it is ENOSPC
    for row in ROWS[1:]:
        writer.write(row)
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS
    (warning,) = caplog.records
    assert "no more TensorBoard events: [Errno 28]" in warning.message
    with MetricsWriter(tmp_path / "metrics.jsonl"):
        assert scalars(tmp_path) == SCALARS
