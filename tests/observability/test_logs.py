import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.observability.logs import set_up_logging


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_messages_go_to_the_process_file_and_only_warnings_to_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    path = set_up_logging(tmp_path, "driver", console_level=logging.WARNING)
    log = logging.getLogger("rlkit.test")
    log.info("quiet detail")
    log.warning("engine 1 is gone")
    logging.getLogger("aiohttp.access").info("GET /health")
    assert path == tmp_path / "logs" / "driver.log"
    text = path.read_text()
    assert "INFO" in text and "quiet detail" in text and "engine 1 is gone" in text and "GET /health" not in text
    shown = capsys.readouterr().err
    assert "engine 1 is gone" in shown and "quiet detail" not in shown


def test_a_second_call_moves_the_process_to_its_new_file(tmp_path: Path):
    first = set_up_logging(tmp_path, "idle")
    second = set_up_logging(tmp_path, "rank0")
    logging.getLogger("rlkit.test").info("hello")
    assert "hello" not in first.read_text()
    assert second.read_text().count("hello") == 1


def test_python_warnings_are_logged(tmp_path: Path):
    path = set_up_logging(tmp_path, "rank0")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old spelling", UserWarning, stacklevel=1)
    assert "old spelling" in path.read_text()
