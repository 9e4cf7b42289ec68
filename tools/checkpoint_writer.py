"""Writes a converted Hugging Face checkpoint. Not a program itself; `checkpoint_files.py` says what is to be written.

Every source file gives one file of the same name. It is written in pieces of a few megabytes by several threads, each
of which reads, converts and writes at offsets that are known beforehand: memory does not grow with tensors, files or
the checkpoint. A file appears under its name when it is complete and on the disk, so that a conversion that was
interrupted goes on with the first file that is missing. Index and companions come last, `config.json` the very last.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from checkpoint_files import INDEX, ConversionError, NewFile, NewTensor, Reader, bytes_of
from torch import Tensor

FLUSH_BYTES = 128 * 1024**2
"""Written data after which the disk is told to begin."""
WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf"))


class Conversion:
    """Writes `files` into `directory`. Use as a context."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[NewFile],
        reader: Reader,
        *,
        num_workers: int,
        title: str,
        made_from: str = "",
    ) -> None:
        """`made_from`: what the result depends on beside the source files."""
        self._made_from = made_from
        self._directory = directory
        self._files = files
        self._reader = reader
        self._title = title
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="convert")
        self._flushers = ThreadPoolExecutor(2, thread_name_prefix="flush")
        self._num_workers = num_workers
        self._threads = torch.get_num_threads()
        self.num_written_bytes = 0
        self.num_kept = 0
        """Files that an earlier run had completed."""

    def __enter__(self) -> "Conversion":
        torch.set_num_threads(1)  # the threads here are the parallelism
        self._directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._flushers.shutdown(cancel_futures=True)
        self._reader.close()
        torch.set_num_threads(self._threads)

    def run(self) -> None:
        """Write what is missing. The next file is converted while the last one goes to the disk."""
        progress = _Progress(self._title, self._files)
        ending: list[Future[None]] = []
        for file in self._files:
            header = _header(file, self._made_from)
            if _is_complete(self._directory / file.name, file, header):
                self.num_kept += 1
                progress.skip(file)
                continue
            output = _Output(self._directory / file.name, file, header, self._flushers)
            try:
                self._convert(file, output, progress)
            except BaseException:
                output.abandon()
                raise
            ending.append(self._flushers.submit(output.finish))
            while len(ending) > 1:
                ending.pop(0).result()
            self.num_written_bytes += sum(tensor.num_bytes for tensor in file.tensors)
        for future in ending:
            future.result()
        progress.end(self._reader.num_bytes, self.num_written_bytes)

    def _convert(self, file: NewFile, output: "_Output", progress: "_Progress") -> None:
        waiting: set[Future[None]] = set()
        try:
            for piece in file.pieces:
                waiting.add(self._workers.submit(piece, output.write))
                if len(waiting) >= 4 * self._num_workers:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    _raise_first(done)
                    progress.show(self._reader.num_bytes)
            done, waiting = wait(waiting, return_when=FIRST_EXCEPTION)
            _raise_first(done)
        finally:  # nobody may write any more when the file is closed
            for future in waiting:
                future.cancel()
            wait(waiting)
        progress.done(file, self._reader.num_bytes)


class _Output:
    """One file on its way: written at offsets, flushed as it grows, renamed when it is on the disk."""

    def __init__(self, path: Path, file: NewFile, header: bytes, flushers: ThreadPoolExecutor) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        self._descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._flushers = flushers
        self._lock = threading.Lock()
        self._unflushed = 0
        self._flush: Future[None] | None = None
        self._start: dict[str, int] = {}
        end = len(header)
        for tensor in _ordered(file):
            self._start[tensor.name] = end
            end += tensor.num_bytes
        self._size = end
        os.pwrite(self._descriptor, header, 0)

    def write(self, name: str, offset: int, data: Tensor) -> None:
        view = bytes_of(data)
        start, done = self._start[name] + offset, 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], start + done)
        with self._lock:
            self._unflushed += len(view)
            if self._unflushed >= FLUSH_BYTES and (self._flush is None or self._flush.done()):
                self._unflushed = 0
                self._flush = self._flushers.submit(os.fdatasync, self._descriptor)

    def finish(self) -> None:
        if self._flush is not None:
            self._flush.result()
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        os.replace(self._part, self._path)
        _sync_folder(self._path.parent)

    def abandon(self) -> None:
        if self._flush is not None:
            self._flush.exception()
        os.close(self._descriptor)
        self._part.unlink(missing_ok=True)


class _Progress:
    """A line every few seconds, on a terminal over itself."""

    def __init__(self, title: str, files: Sequence[NewFile]) -> None:
        self._title = title
        self._num_files = len(files)
        self._bytes_of = {file.name: file.source.stat().st_size for file in files}
        self._left = sum(self._bytes_of.values())
        self._num_done = 0
        self._begun = time.monotonic()
        self._shown = self._begun
        self._every_s = 0.5 if sys.stderr.isatty() else 10.0

    def skip(self, file: NewFile) -> None:
        self._num_done += 1
        self._left -= self._bytes_of[file.name]

    def done(self, file: NewFile, num_read: int) -> None:
        self._num_done += 1
        self.show(num_read)

    def show(self, num_read: int) -> None:
        now = time.monotonic()
        if now - self._shown < self._every_s or num_read == 0:
            return
        self._shown = now
        rate = num_read / (now - self._begun)
        minutes = max(0.0, (self._left - num_read) / rate / 60)
        line = (
            f"{self._title}: {self._num_done}/{self._num_files} files, {num_read / 1e9:.1f} GB read at"
            f" {rate / 1e6:.0f} MB/s, {minutes:.0f} min left"
        )
        print(f"\r\033[K{line}" if sys.stderr.isatty() else line, end="", file=sys.stderr, flush=True)
        print("" if sys.stderr.isatty() else "\n", end="", file=sys.stderr, flush=True)

    def end(self, num_read: int, num_written: int) -> None:
        seconds = max(1e-9, time.monotonic() - self._begun)
        line = (
            f"{self._title}: {self._num_files} files, read {num_read / 1e9:.2f} GB at {num_read / seconds / 1e6:.0f}"
            f" MB/s, wrote {num_written / 1e9:.2f} GB at {num_written / seconds / 1e6:.0f} MB/s in {seconds:.1f} s"
        )
        print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr)


def prepare(source: Path, target: Path) -> None:
    """ConversionError where `target` would overwrite `source`. The target is no checkpoint until `finish`."""
    if source.resolve() == target.resolve():
        raise ConversionError(f"the result cannot replace its source {source}; choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").unlink(missing_ok=True)


def finish(source: Path, target: Path, files: Sequence[NewFile], config: dict[str, Any]) -> None:
    """Write the index, copy tokenizer and companions, remove what an earlier conversion left, write the config."""
    names = {file.name for file in files}
    for path in target.glob("*.safetensors"):
        if path.name not in names:
            path.unlink()
    file_of = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    if names == {"model.safetensors"}:
        (target / INDEX).unlink(missing_ok=True)
    else:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        _write_text(target / INDEX, json.dumps(index, indent=2) + "\n")
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not path.name.startswith(".") and not is_weights and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    _write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
    _sync_folder(target)


def _header(file: NewFile, made_from: str) -> bytes:
    """The bytes before the data, padded to 8. They name the source's header, so that a file that was made of another
    source is not taken for this one."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "source": _digest(file.source, made_from)}}
    end = 0
    for tensor in _ordered(file):
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.num_bytes],
        }
        end += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _ordered(file: NewFile) -> list[NewTensor]:
    """Large items first: every tensor then begins where its dtype may, as readers demand."""
    return sorted(file.tensors, key=lambda tensor: -(tensor.num_bytes // max(1, prod(tensor.shape))))


def _digest(path: Path, made_from: str) -> str:
    """Of the header, the size and the time of change."""
    status = path.stat()
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
    return hashlib.sha256(header + f"{status.st_size} {status.st_mtime_ns} {made_from}".encode()).hexdigest()[:32]


def _is_complete(path: Path, file: NewFile, header: bytes) -> bool:
    if not path.is_file() or path.stat().st_size != len(header) + sum(tensor.num_bytes for tensor in file.tensors):
        return False
    with path.open("rb") as existing:
        return existing.read(len(header)) == header


def _raise_first(done: Iterable[Future[None]]) -> None:
    for future in done:
        future.result()


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
