import contextlib
import io
import os
import pty

import pytest

from rlkit.observability.console import Console, curve, format_step, sparkline

FULL = {
    "rollout/reward": 0.63,
    "rollout/response_length": 5.1,
    "rollout/truncated_ratio": 0.125,
    "train/grad_norm": 0.42,
    "time/generate_s": 1.2,
    "time/train_s": 0.8,
    "time/sync_s": 0.1,
}


def test_step_line_has_values_with_units():
    line = format_step(12, FULL, total_steps=100)
    assert line.startswith("step  12/100  reward  0.630")
    for part in ("len     5.1", "cut  12.5%", "gen   1.2s", "train   0.8s", "sync  0.1s"):
        assert part in line


def test_lines_of_different_steps_are_aligned():
    other = {name: value * 7 for name, value in FULL.items()}
    a, b = format_step(3, FULL, total_steps=100), format_step(99, other, total_steps=100)
    assert len(a) == len(b)
    assert [i for i in range(len(a)) if a.startswith(("reward", "len", "gen"), i)] == [
        i for i in range(len(b)) if b.startswith(("reward", "len", "gen"), i)
    ]


def test_evaluation_line_shows_scores_only():
    metrics = {"eval/gsm8k": 0.5, "eval/gsm8k/unscored": 3.0, "eval/aime": 0.1, "time/evaluate_s": 2.0}
    assert format_step(5, metrics, total_steps=20).split() == ["eval", "5/20", "gsm8k", "0.500", "aime", "0.100"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 1.0], "▁█"),
        ([0.0, float("nan"), 1.0], "▁█"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
    ],
    ids=["empty", "constant", "two", "nan", "ramp"],
)
def test_sparkline(values: list[float], expected: str):
    assert sparkline(values) == expected


def test_sparkline_averages_down_to_width():
    assert sparkline([0, 0, 0, 0, 1, 1, 1, 1], width=2) == "▁█"


def test_curve_rises_with_its_values():
    lines = curve([i / 39 for i in range(40)], title="reward", width=40, height=6).splitlines()
    assert lines[0] == "reward"
    heights = [sum(line[10 + column] != " " for line in lines[1:7]) for column in range(40)]
    assert heights == sorted(heights) and heights[0] == 1 and heights[-1] == 6
    assert "1.000" in lines[1] and "0.000" in lines[6]
    assert curve([], title="reward") == ""


def test_a_pipe_gets_plain_lines_and_no_bar():
    stream = io.StringIO()
    console = Console(total_steps=2, stream=stream)
    with console.progress("generate", num_total=3) as bar:
        bar.update(2)
        console.step_line(0, {"rollout/reward": 0.5})
    assert stream.getvalue() == "step 0/2  reward  0.500\n"


def read_to_end(leader: int) -> str:
    """All that was written to a pseudo-terminal whose other end is closed."""
    pieces = []
    with contextlib.suppress(OSError):  # EIO is its end of file
        while piece := os.read(leader, 65536):
            pieces.append(piece)
    os.close(leader)
    return b"".join(pieces).decode()


def test_a_terminal_gets_a_bar_that_goes_away():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        console = Console(stream=stream)
        with console.progress("generate", num_total=3) as bar:
            bar.update(3)
        console.say("[done]")
    shown = read_to_end(leader)
    assert "generate" in shown and "3/3" in shown
    assert "[done]" in shown.splitlines()[-1]
    assert "\x1b[2K" in shown  # the bar's line was erased


def test_the_loss_is_shown_where_there_is_no_reward():
    assert "loss" in format_step(0, {"train/loss": 1.5, "rollout/response_length": 3.0})
    assert "loss" not in format_step(0, {"train/loss": 1.5, "rollout/reward": 0.5})


def test_an_ascii_stream_does_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream=stream).show_curve([0.0, 1.0], title="reward")
    assert raw.getvalue().startswith(b"reward\n")
