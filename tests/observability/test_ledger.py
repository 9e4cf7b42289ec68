import multiprocessing
from pathlib import Path

import pytest

from rlkit.observability.ledger import Ledger, LedgerEvent, read_ledger


def test_events_come_back_in_order_with_their_fields(tmp_path: Path):
    path = tmp_path / "run" / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.write(LedgerEvent.STARTED, step=0)
        ledger.write(LedgerEvent.ISSUED, step=0, group=7, position=3, epoch=0, num_samples=2, seeds=[1, 2**62])
        ledger.write(LedgerEvent.DROPPED, step=0, group=7, reason="unscored")
        ledger.sync()
    records = list(read_ledger(path))
    assert [r.event for r in records] == [LedgerEvent.STARTED, LedgerEvent.ISSUED, LedgerEvent.DROPPED]
    assert records[1].fields == {
        "step": 0,
        "group": 7,
        "position": 3,
        "epoch": 0,
        "num_samples": 2,
        "seeds": [1, 2**62],
    }
    assert records[0].time <= records[2].time
    assert records[0].event.is_about_the_run and not records[1].event.is_about_the_run


def test_a_line_is_readable_before_close(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.write(LedgerEvent.SAVED, step=4)
    assert [r.fields for r in read_ledger(ledger.path)] == [{"step": 4}]
    ledger.close()


def test_reopening_after_a_torn_line_appends_on_a_new_line(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.write(LedgerEvent.KEPT, step=0, group=0)
    with path.open("ab") as file:
        file.write(b'{"event":"kept","time":1.0,"gro')
    with Ledger(path) as ledger:
        ledger.write(LedgerEvent.RESUMED, step=0, group=0)
    assert [r.event for r in read_ledger(path)] == [LedgerEvent.KEPT, LedgerEvent.RESUMED]


def test_an_unknown_event_names_its_line(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event":"kept","time":1.0}\n{"event":"eaten","time":1.0}\n')
    with pytest.raises(ValueError, match=r"ledger\.jsonl:2: .*eaten"):
        list(read_ledger(path))


def _write_many(path: Path, step: int, count: int) -> None:
    with Ledger(path) as ledger:
        for group in range(count):
            ledger.write(LedgerEvent.GENERATED, step=step, group=group, lengths=list(range(200)))


def test_lines_of_two_processes_do_not_mix(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, step, 300)) for step in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    records = list(read_ledger(path))
    for step in (0, 1):
        assert [r.fields["group"] for r in records if r.fields["step"] == step] == list(range(300))
