"""The report of runs that went wrong names what it was, in one offline file, also when files are missing or torn."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlkit.cli.main import main
from rlkit.observability.guard_log import FiredGuard, append_guard
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.observability.report.charts import Series, line_chart, number
from rlkit.observability.report.findings import allowed_staleness, findings
from rlkit.observability.report.page import render, write_report
from rlkit.observability.report.parts import HIDDEN, shown_value
from rlkit.observability.report.record import RunRecord, Setting, read_run
from rlkit.observability.sample_files import RecordedSample, StepSamples, TokenRun, thin_out, write_samples

BROKEN = Path(__file__).parents[1] / "data" / "broken_runs"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting, and collects what an accessible, offline page has to have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.unnamed: list[str] = []
        self.tables: list[set[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if "id" in given:
            self.ids.append(str(given["id"]))
        for name in ("src", "href", "xlink:href", "action"):
            if name in given:
                (self.links if str(given[name]).startswith("#") else self.addresses).append(str(given[name]))
        if tag == "svg" and not (given.get("role") == "img" and given.get("aria-label")):
            self.unnamed.append(tag)
        if tag == "table":
            self.tables.append(set())
        if tag in ("caption", "th") and self.tables:
            self.tables[-1].add(tag if tag == "caption" else f"th {given.get('scope')}")
        assert tag != "script", "the report works without a script"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()  # <line .../>, as SVG has them

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


@pytest.mark.parametrize(
    "name, title, evidence",
    [
        ("length_hacking", "The reward is paid for length", "heldout went from 0.41 to"),
        ("all_truncated", "All responses are cut off", "since step 4 100% of the responses"),
        ("stale_weights", "The engines seem to hold old weights", "grew steadily from 1e-05 at step 0"),
    ],
)
def test_the_first_line_names_what_went_wrong(name: str, title: str, evidence: str, tmp_path: Path):
    run = shutil.copytree(BROKEN / name, tmp_path / name)
    found = findings(read_run(run))
    assert found[0].title == title and evidence in found[0].evidence
    text = write_report(run).read_text(encoding="utf-8")
    section = text[text.index('id="wrong"') : text.index('id="curves"')]
    assert section.index(title) < section.index(evidence)


@pytest.mark.parametrize(
    "settings, allowed",
    [
        ({}, 0),
        ({"update_weights_interval": 3}, 2),
        ({"async_mode": "one-step"}, 1),
        ({"async_mode": "full"}, 2),
        ({"async_mode": "full", "max_staleness": 4}, 4),
        ({"async_mode": "full", "stale_groups": "downweight"}, None),
        ({"partial_rollout": True}, None),
    ],
)
def test_how_old_a_response_may_be(settings: dict[str, object], allowed: int | None):
    items = [Setting(section="x", name=name, value=value, default=None, origin="") for name, value in settings.items()]
    assert allowed_staleness(RunRecord(path=Path("run"), settings=items)) == allowed


def test_the_page_is_offline_well_formed_and_accessible(tmp_path: Path):
    run = shutil.copytree(BROKEN / "length_hacking", tmp_path / "run")
    append_guard(run, FiredGuard(step=3, guard="all_truncated", evidence="e <b>", remedy="r"))
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert page.open == [] and page.addresses == [] and page.unnamed == []
    assert {link[1:] for link in page.links} <= set(page.ids) and len(page.ids) == len(set(page.ids))
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(
        after <= before + 1 or after == 4 for before, after in zip(page.headings, page.headings[1:], strict=False)
    )
    assert page.tables and all({"caption", "th col", "th row"} <= table for table in page.tables)


def test_text_of_a_run_cannot_become_markup_and_secrets_stay(tmp_path: Path):
    evil = "</div><script>alert(1)</script>"
    tokens = TokenRun(start=0, ids=[1, 2], pieces=[evil, '"><img src=x>'], rollout_logprobs=[-1, -1], gaps=[2.0, 0])
    sample = RecordedSample(
        group=1, index=0, seed=1, kinds=["best"], prompt=evil, prompt_ids=[1], label=evil, response_length=2,
        reward=1.0, status="completed", weight_versions=[0], mean_gap=1.0, max_gap=2.0, head=tokens, tail=None,
    )  # fmt: skip
    write_samples(tmp_path, StepSamples(step=0, samples=[sample]))
    entry = {"value": {"HF_TOKEN": "hunter2", "NCCL_DEBUG": "INFO"}, "from": "command line"}
    (tmp_path / "config.json").write_text(json.dumps({"cluster": {"train_env_vars": entry}}))
    text = render(read_run(tmp_path))
    Page(text)
    assert "hunter2" not in text and HIDDEN in text and "NCCL_DEBUG" in text
    assert text.count("&lt;script&gt;") >= 2


def test_settings_with_harmless_names_are_shown():
    assert shown_value("input_key", "prompt") == "prompt"
    assert shown_value("rollout_stop_token_ids", [1]) == "[1]"
    assert shown_value("max_tokens_per_gpu", 4096) == "4096"


def test_two_hundred_steps_stay_under_five_megabytes(tmp_path: Path):
    """The worst case: eight samples a step, every token shaded."""
    rows = [
        {"step": k, **{f"train/{name}": k * 0.1 for name in "abcdefgh"}, "rollout/reward": 0.5, "time/step_s": 1.0}
        for k in range(200)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    count = 384
    for step in range(200):
        run = TokenRun(
            start=0, ids=[1] * count, pieces=["word "] * count, rollout_logprobs=[-1.0] * count,
            gaps=[0.05 if i % 2 else 0.5 for i in range(count)],
        )  # fmt: skip
        samples = [
            RecordedSample(
                group=step, index=i, seed=1, kinds=["best"], prompt="p" * 2000, prompt_ids=[1], label="42",
                response_length=count, reward=0.0, status="completed", weight_versions=[step], mean_gap=0.2,
                max_gap=0.5, head=run, tail=None,
            )
            for i in range(8)
        ]  # fmt: skip
        write_samples(tmp_path, StepSamples(step=step, samples=samples))
    path = write_report(tmp_path)
    assert path.stat().st_size < 5_000_000
    text = path.read_text(encoding="utf-8")
    assert "Step 0: 8 samples" in text and "Step 199: 8 samples" in text and "are left out to keep this file" in text


def test_a_broken_folder_still_gives_a_report(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        read_run(tmp_path)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write(LedgerEvent.STARTED, step=0, source="engines", rollout_state={})
        ledger.write(LedgerEvent.FAILED, error="EngineError", message="engine 0 died\nwith details")
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"train/loss":null}\n{"step":1,"train/lo')
    (tmp_path / "config.json").write_text("{")
    run = read_run(tmp_path)
    assert any("config.json cannot be read" in note for note in run.notes)
    titles = [finding.title for finding in findings(run)]
    assert titles[0] == "The run failed: EngineError" and "Numbers that are not finite" in titles
    Page(render(run))


def test_the_command_writes_it_and_says_what_looks_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = shutil.copytree(BROKEN / "all_truncated", tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert "error: All responses are cut off" in capsys.readouterr().out
    assert (run / "report.html").is_file()
    assert main(["report", str(tmp_path)]) == 2


def test_a_full_folder_of_samples_is_thinned_from_the_old_end(tmp_path: Path):
    for step in range(12):
        write_samples(tmp_path, StepSamples(step=step, samples=[]))
    size = (tmp_path / "samples" / "step_0000000.json").stat().st_size
    deleted = thin_out(tmp_path, max_bytes=4 * size)
    left = sorted(int(path.stem[5:]) for path in (tmp_path / "samples").glob("*.json"))
    assert len(left) <= 4 and left[-1] == 11 and left[0] == 0 and len(deleted) + len(left) == 12


def test_charts_keep_spikes_and_describe_themselves():
    values = [0.0] * 1000
    values[500] = 7.0
    figure = line_chart("Norm", [Series(label="norm", steps=range(1000), values=values)])
    assert figure.count(",") < 700 and "between 0 and 7" in figure
    heights = [float(pair.split(",")[1]) for pair in re.search(r'points="([^"]*)"', figure)[1].split()]  # type: ignore[index]
    assert min(heights) == 10.0
    assert line_chart("Empty", [Series(label="x", steps=[], values=[])]) == ""


@pytest.mark.parametrize("value, text", [(0, "0"), (1234567, "1.23e6"), (0.00001, "1.00e-5"), (0.1234567, "0.1235")])
def test_numbers_are_short(value: float, text: str):
    assert number(value) == text
