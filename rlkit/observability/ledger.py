"""The ledger of a run: `ledger.jsonl`, one line an event, never rewritten.

It answers what happened to every prompt: issued, generated, graded, kept or dropped (and why), trained (in which step,
on which rank). The rollout manager writes the events of sample groups, the driver those of the run; each line is one
`write` to a file opened for appending, so that lines of several processes of one host do not mix and a killed process
loses nothing it has written.

A resumed run appends. Its RESUMED event carries the step and the state of the checkpoint: events of that step and later
steps that stand before it belong to work that was thrown away. `audit.py` reads a ledger with that rule.

Fields by event (all lists run over the samples of the group, in order):

| event | fields |
|---|---|
| drawn | step, first_group, num_groups, begin, end (each [epoch, rows drawn of it]), too_long, num_rows |
| issued | step, group, position, epoch, num_samples, seeds; `pooled` with `--async-mode full`: for any later step |
| generated | step, group, status, lengths, versions, and `reissued` where a request had to be sent again |
| graded | step, group, rewards (null: unscored) |
| kept | step, group; with `--async-mode` staleness, in weight versions |
| dropped | step, group, reason; `indices` where only some samples of the group are meant |
| buffered | step, group, reason |
| trained | step, rank, groups (with a sample on that rank), step_samples (distinct ones over all ranks) |
| started, resumed | step (the first), source, rollout_state; resumed also: |
| | checkpoint_step, weight_version, path, and `changed` where settings differ from the start before |
| saved | step, weight_version, path, rollout_state |
| finished | step (the next one that there is not) |
| stopped | step (the next), signal, saved |
| failed | error, message |
| restarted | attempt, max_restarts, exit_status |

`source` is where samples come from: `engines`, `labels` (supervised) or `replay`.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson


class LedgerEvent(StrEnum):
    DRAWN = "drawn"
    ISSUED = "issued"
    GENERATED = "generated"
    GRADED = "graded"
    KEPT = "kept"
    DROPPED = "dropped"
    BUFFERED = "buffered"
    TRAINED = "trained"
    STARTED = "started"
    RESUMED = "resumed"
    SAVED = "saved"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    RESTARTED = "restarted"

    @property
    def is_about_the_run(self) -> bool:
        return self in _ABOUT_THE_RUN


_ABOUT_THE_RUN = frozenset(
    {
        LedgerEvent.STARTED,
        LedgerEvent.RESUMED,
        LedgerEvent.SAVED,
        LedgerEvent.FINISHED,
        LedgerEvent.STOPPED,
        LedgerEvent.FAILED,
        LedgerEvent.RESTARTED,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRecord:
    """One line, read back."""

    event: LedgerEvent
    time: float
    """Unix time in seconds."""
    fields: dict[str, Any]


class Ledger:
    """Appends events to a file. Every `write` reaches the operating system before it returns; `sync` reaches the
    disk.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        end_last_line(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: LedgerEvent, **fields: Any) -> None:
        """Append one line. `event` and `time` are the writer's own keys."""
        self.write_together(event, [fields])

    def write_together(self, event: LedgerEvent, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append several lines at once: a process that is killed has written all of them or none."""
        now = round(time.time(), 3)
        data = b"".join(
            orjson.dumps({"event": event, "time": now, **fields}, option=orjson.OPT_APPEND_NEWLINE) for fields in lines
        )
        write_fully(self._fd, data)

    def sync(self) -> None:
        """Wait until everything written so far is on the disk; called when a checkpoint claims it."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_ledger(path: Path, *, torn: list[int] | None = None) -> Iterator[LedgerRecord]:
    """The events in order. A line torn by a crash (of any writer) is skipped, and its number is added to `torn`; an
    unknown event is a ValueError with its line number.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                fields = orjson.loads(line)
                event = LedgerEvent(fields.pop("event"))
            except orjson.JSONDecodeError:
                if torn is not None:
                    torn.append(number)
                continue
            except (ValueError, KeyError) as error:
                raise ValueError(f"{path}:{number}: not a ledger event: {error}") from error
            yield LedgerRecord(event=event, time=fields.pop("time"), fields=fields)


def write_fully(fd: int, data: bytes) -> None:
    """One `write`, normally; the rest of it where only a part was taken (a full disk raises OSError)."""
    while data:
        data = data[os.write(fd, data) :]


def end_last_line(path: Path) -> None:
    """Close a line that a killed writer left open, so that the next event starts on a line of its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
