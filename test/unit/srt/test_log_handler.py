from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.kernel.stack_hooks import HANDLER_PID
from sglang_crashkit.memory.ring import MAX_LOG_BYTES, LogRecord, LogWriter, read_log
from sglang_crashkit.srt import log_handler
from sglang_crashkit.srt.log_handler import RingHandler, keep_log_records
from unit.srt.conftest import Listener

ARGS = SimpleNamespace(crash_dump_folder="/crash", api_key="canary-of-a-field")
own = logging.getLogger("sglang.srt.test")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What a test does to the loggers is undone."""
    before = {logging.getLogger(name): (name, [*logging.getLogger(name).handlers]) for name in ("", "sglang")}
    own.setLevel(logging.INFO)
    yield
    log_handler.forget()
    for logger, (_name, handlers) in before.items():
        logger.handlers[:] = handlers
        logger.propagate = True


@pytest.fixture
def handler() -> Iterator[RingHandler]:
    ring = LogWriter(200)
    yield RingHandler(ring, "/sock", {"canary-secret"}, quotes=True)
    ring.close()


def kept_by(*names: str) -> RingHandler | None:
    """Return the handler that one of these loggers has."""
    found = [one for name in names or ("", "sglang") for one in logging.getLogger(name).handlers]
    return next((one for one in found if isinstance(one, RingHandler)), None)


def told(handler: RingHandler | None) -> list[LogRecord]:
    return read_log(handler.ring.fd, 200)


def log(handler: RingHandler, message: str, *args: object, name: str = "sglang.srt", **more: Any) -> None:
    handler.handle(logging.LogRecord(name, logging.ERROR, "file.py", 1, message, args, more.get("exc_info")))


def raised(message: str) -> Any:
    try:
        raise ValueError(message)
    except ValueError as error:
        return type(error), error, error.__traceback__


def test_another_handler_at_the_same_place_gets_a_ring(listener: Listener) -> None:
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)
    for pid in (7, 8, 8):
        (listener.path.parent / HANDLER_PID).write_text(str(pid))
        keep_log_records(ARGS, of_all=True)
    own.info("once")
    assert [listener.heard()["event"] for _ in range(2)] == ["log", "log"]
    assert [one.text for one in told(kept_by())] == ["once"]


def test_a_record_is_kept_as_it_was_logged(handler: RingHandler) -> None:
    log(handler, "%d of them", 5)
    log(handler, "one %s too few %s", 1)
    kept = [(one.level, one.logger, one.text) for one in told(handler)]
    assert kept == [(logging.ERROR, "sglang.srt", text) for text in ("5 of them", "one %s too few %s")]


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("the key is canary-secret", "the key is <redacted>"),
        ("Receive: obj=GenerateReqInput(text='a prompt')", None),
        ("Finish: obj=GenerateReqInput(text='a prompt'), out={}", None),
        ("Receiver is ready", "Receiver is ready"),
        (
            "Prefetch failed: TokenizedGenerateReqInput(rid='ab12', input_text=None, input_ids=[1, 2], lora_path=None)",
            "Prefetch failed: TokenizedGenerateReqInput(rid='ab12', input_text=None, input_ids=<left out>",
        ),
        (
            "400: {'model': 'm', 'messages': [{'role': 'user'}]}\nnext",
            "400: {'model': 'm', 'messages': <left out>\nnext",
        ),
        ('{"rid": "ab12", "text": "a prompt"}', '{"rid": "ab12", "text": <left out>'),
        ("image_data=['http://x'] was not loaded", "image_data=<left out>"),
        # What SGLang says of itself.
        ("context_length=4096, input_ids: torch.int64", "context_length=4096, input_ids: torch.int64"),
        ("  File 'x.py', line 3\n    return self.text", "  File 'x.py', line 3\n    return self.text"),
    ],
)
@pytest.mark.parametrize("quotes", [False, True])
def test_neither_secrets_nor_what_requests_hold_is_kept(
    handler: RingHandler, quotes: bool, message: str, kept: str | None
) -> None:
    handler.quotes = quotes
    log(handler, message)
    log(handler, message, name="sglang.srt.utils.request_logger.stdout")
    assert [one.text for one in told(handler)] == ([kept] if kept is not None else [])


def test_of_a_long_record_both_ends_without_secrets_are_kept(handler: RingHandler) -> None:
    # At each place of the record once, so that every cut would go through one.
    for shift in range(0, 9000, 7):
        log(
            handler,
            "Scheduler hit an exception: " + "x" * shift + "canary-secret" + "y" * (9000 - shift) + " at line 7",
        )
    found = [one.text for one in told(handler)]
    assert all(text.startswith("Scheduler hit") and text.endswith("at line 7") for text in found)
    assert max(map(len, found)) <= MAX_LOG_BYTES
    assert not any("canary" in text or "-secret" in text for text in found)


def test_an_exception_is_kept_with_its_innermost_frames(handler: RingHandler) -> None:
    log(handler, "failed", exc_info=raised("the reason"))
    formatted = logging.LogRecord("sglang", logging.ERROR, "f", 1, "failed", (), raised("the reason"))
    logging.Formatter().format(formatted)
    handler.handle(formatted)
    short, long = (one.text for one in told(handler))
    assert short == "failed\nValueError: the reason\n"
    assert long.startswith("failed\nTraceback")
    assert long.endswith("ValueError: the reason")


class SayingError(Exception):
    """One whose words are no argument of it, as pydantic's are not."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __str__(self) -> str:
        return f"invalid: {self.words}"


@pytest.mark.parametrize("kind", [ValueError, KeyError, SayingError])
def test_unsearchable_prompts_cost_the_words_that_an_exception_prints(
    handler: RingHandler, kind: type[Exception]
) -> None:
    handler.quotes = False
    try:
        raise kind("sing of\nthe canary")
    except kind as error:
        log(handler, "failed: %s", error)
        log(handler, f"Scheduler hit an exception: {traceback.format_exc()}")
        handled = type(error), error, error.__traceback__
    log(handler, f"failed: {handled[1]}", exc_info=handled)
    during, whole, after = (one.text for one in told(handler))
    assert during == "failed: <redacted>"
    assert "canary" not in whole
    assert after.startswith("failed: <redacted>\n")
    assert after.endswith(f"{kind.__name__}: <redacted>\n")


def test_one_that_fails_is_switched_off_with_one_warning(
    handler: RingHandler, caplog: pytest.LogCaptureFixture
) -> None:
    handler.ring.close()
    log(handler, "one")
    log(handler, "two")
    assert [one.getMessage() for one in caplog.records] == ["crash kit: log records are no longer kept"]


def test_the_handler_is_given_the_ring_once(listener: Listener) -> None:
    for _ in range(2):
        logging.basicConfig(handlers=[logging.NullHandler()], force=True)
        keep_log_records(ARGS, of_all=True)
        own.info("with %s", ARGS.api_key)
    heard = listener.heard()
    assert (heard["event"], heard["has_descriptor"]) == ("log", True)
    assert [one.text for one in told(kept_by())] == ["with <redacted>"] * 2
    assert logging.getLogger().handlers.count(kept_by()) == 1
    assert kept_by().quotes
    child = os.fork()
    if child == 0:
        own.info("of a child")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(told(kept_by())) == 2


@pytest.mark.parametrize(
    ("of_all", "propagates", "wanted"),
    [(True, True, ["root"]), (True, False, ["root", "sglang"]), (False, True, ["sglang"])],
)
def test_it_hangs_behind_what_gets_the_records(
    listener: Listener, of_all: bool, propagates: bool, wanted: list[str]
) -> None:
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)
    sglang = logging.getLogger("sglang")
    sglang.propagate = propagates
    sglang.addHandler(logging.NullHandler())
    keep_log_records(ARGS, of_all=of_all)
    assert [name for name in ("root", "sglang") if kept_by(name)] == wanted


def test_a_program_may_still_set_logging_up(listener: Listener) -> None:
    logging.getLogger().handlers.clear()
    keep_log_records(ARGS, of_all=True)
    assert (kept_by(), logging.getLogger().handlers) == (None, [])


@pytest.mark.parametrize(
    ("environ", "folder"),
    [({"SGLANG_CRASHKIT_PROMPTS": "none"}, "/crash"), ({"SGLANG_CRASHKIT_JOURNAL": "0"}, "/crash"), ({}, None)],
)
def test_without_a_journal_of_prompts_exceptions_are_not_quoted(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], folder: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)
    keep_log_records(SimpleNamespace(crash_dump_folder=folder), of_all=True)
    assert not kept_by().quotes
