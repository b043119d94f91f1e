from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import msgspec
import pytest

from sglang_crashkit.model.step import short_rid
from sglang_crashkit.settings import SPOOL_VARIABLE
from sglang_crashkit.srt import exception_record
from sglang_crashkit.srt.exception_record import (
    find_batches,
    find_prompts,
    tell_exception,
    tell_uncaught,
    watch_threads,
)
from sglang_crashkit.srt.managers.data_parallel_controller import on_controller_exception
from sglang_crashkit.srt.managers.detokenizer_manager import on_detokenizer_exception
from sglang_crashkit.srt.managers.scheduler import on_scheduler_exception
from sglang_crashkit.srt.startup import StartupError
from unit.srt.conftest import CONTEXT, Listener
from unit.support.waiting import LONG


class Scheduler:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def run_batch(self, error: BaseException) -> None:
        raise error


def hit(error: BaseException, hook: Callable[[], None] = tell_exception, **fields: Any) -> None:
    """Do what the scheduler process does around its event loop."""
    try:
        Scheduler(**fields).run_batch(error)
    except type(error):
        hook()


def read_record(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "spool").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_the_rank_writes_its_exception_its_threads_and_its_batch(listener: Listener, short_folder: Path) -> None:
    # Clients choose the ids.
    rids = [f"{n} {'r' * 1_000_000}" for n in range(100)]
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=rid, prompt="secret") for rid in rids], forward_mode="D")
    hit(ValueError("odd\nsecond line"), cur_batch=batch, forward_ct=7)
    heard = listener.heard()
    record = read_record(short_folder)
    assert heard["event"] == "exception"
    assert heard["message"] == "ValueError: odd"
    assert Path(heard["record"]).parent == short_folder / "spool"
    assert record["message"] == "ValueError: odd\nsecond line"
    assert record["pid"] == os.getpid()
    assert record["traceback"][-1].startswith("run_batch (")
    assert record["traceback"][-1].endswith(f":{Scheduler.run_batch.__code__.co_firstlineno + 1})")
    assert record["batch"]["size"] == 100
    assert record["batch"]["forward_count"] == 7
    assert record["batch"]["request_ids"] == [short_rid(rid) for rid in rids[:64]]
    assert len(json.dumps(record)) < 100_000
    assert any("tell_exception" in frame for frames in record["threads"].values() for frame in frames)
    assert "secret" not in json.dumps(record)


@pytest.mark.parametrize("hook", [on_scheduler_exception, on_detokenizer_exception, on_controller_exception])
def test_each_process_that_upstream_starts_tells_of_its_exception(
    listener: Listener, short_folder: Path, hook: Callable[[], None]
) -> None:
    hit(KeyError("rid"), hook)
    assert (listener.heard()["event"], read_record(short_folder)["message"]) == ("exception", "KeyError: 'rid'")


def test_a_failed_start_is_told_by_whoever_waited(short_folder: Path, listener: Listener) -> None:
    hit(StartupError([], "not ready"), on_controller_exception)
    assert list((short_folder / "spool").iterdir()) == []


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class PanicException(BaseException):
    """As a Rust library raises it, which no ``except Exception`` catches."""


def end_by(error: BaseException | None, *, caught: bool) -> None:
    """Be the target of a worker that ends so, where SGLang catches what it does not want to end by."""
    tell_uncaught(lambda: "GPU-1")
    try:
        if error is not None:
            Scheduler().run_batch(error)
    except Exception:
        if not caught:
            raise
        tell_exception()


@pytest.mark.parametrize(
    ("error", "caught", "message", "status"),
    [
        (PanicException("index out of bounds"), True, "PanicException: index out of bounds", 1),
        (SystemExit(3), True, "SystemExit: 3", 3),
        (SystemExit("no model"), True, "SystemExit: no model", 1),
        (ValueError("before SGLang catches any"), False, "ValueError: before SGLang catches any", 1),
        (ValueError("told by SGLang's own"), True, "ValueError: told by SGLang's own", 0),
        # No one wants to know of these.
        (SystemExit(0), True, None, 0),
        (SystemExit(), True, None, 0),
        (KeyboardInterrupt(), True, None, 1),
        (None, True, None, 0),
    ],
    ids=repr,
)
def test_a_worker_tells_of_what_ends_it_once(
    listener: Listener, short_folder: Path, error: BaseException | None, caught: bool, message: str | None, status: int
) -> None:
    process = CONTEXT.Process(target=end_by, args=(error,), kwargs={"caught": caught})
    process.start()
    process.join(LONG)
    assert process.exitcode == status
    heard = listener.heard_so_far()
    told = [(one["event"], one["message"].rpartition("test_exception_record.")[2]) for one in heard]
    assert told == ([("exception", message)] if message is not None else [])
    if message is not None:
        assert heard[0]["soft"] is isinstance(error, SystemExit)
        assert read_record(short_folder)["traceback"][-1].startswith("run_batch (")


def test_the_exception_stands_there_as_python_prints_it(listener: Listener, short_folder: Path) -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            Scheduler().run_batch(ValueError("odd " + "x" * 20_000))
            raise AssertionError("it raises") from error
    except ValueError:
        tell_exception()
    printed = read_record(short_folder)["printed"]
    assert len(printed) == 16_000
    hit(ValueError("odd"))
    lines = read_record(short_folder)["printed"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: odd"
    assert f'  File "{__file__}", line {Scheduler.run_batch.__code__.co_firstlineno + 1}, in run_batch' in lines
    assert "    raise error" in lines


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError(), "ValueError"),
        (ValueError("\n\n x"), "ValueError: "),
        (ValueError("\udcff"), "ValueError: \udcff"),
        (ValueError("x" * 100_000), "ValueError: " + "x" * 288),
        (UnprintableError(), "unit.srt.test_exception_record.UnprintableError: <exception str() failed>"),
        (SystemExit(3), "SystemExit: 3"),
    ],
    ids=lambda value: repr(type(value))[:40],
)
def test_any_exception_can_be_told(listener: Listener, error: BaseException, message: str) -> None:
    hit(error)
    told = listener.heard()["message"]
    assert told.strip().endswith(message.strip().removeprefix("unit.srt."))
    assert len(told) <= 300


def test_no_part_of_a_secret_is_left_at_the_end_of_a_message(listener: Listener, short_folder: Path) -> None:
    secret, args = "correct-horse-battery-staple", SimpleNamespace(api_key="correct-horse-battery-staple")
    message = "x" * (exception_record.MAX_MESSAGE - len("ValueError: ") - 20) + f" {secret}"
    hit(ValueError(message), server_args=args)
    listener.heard()
    assert "correct-horse" not in json.dumps(read_record(short_folder))


#: Raises in a program that has no title, and says how many arguments it has afterwards.
ARGUMENTS = """
import sys
from pathlib import Path
from sglang_crashkit.srt.exception_record import write_record
def arguments(): return len(Path("/proc/self/cmdline").read_bytes().split(b"\\0"))
before = arguments()
try: raise ValueError
except ValueError as error: told = write_record(error, "exception")
print(before, arguments(), told["record"])
"""


def test_a_record_leaves_the_command_line_as_it_is(short_folder: Path) -> None:
    environ = os.environ | {SPOOL_VARIABLE: str(short_folder / "spool")}
    command = [sys.executable, "-c", ARGUMENTS, "--port", "31234"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LONG, check=True)
    before, after, record = done.stdout.split()
    assert (before, Path(record).is_file()) == (after, True)


def test_without_a_handler_nothing_is_written_and_nothing_waited_for(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exception_record, "CAPTURE_WAIT_SECS", LONG)
    started = time.monotonic()
    hit(ValueError("odd"))
    assert time.monotonic() - started < LONG / 2
    assert list(short_folder.iterdir()) == []


def test_a_spool_that_is_gone_does_not_silence_the_rank(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPOOL_VARIABLE, "/nowhere/spool")
    hit(ValueError("odd"))
    heard = listener.heard()
    assert (heard["message"], heard.get("record")) == ("ValueError: odd", None)


def test_a_silent_handler_holds_the_rank_for_two_seconds(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exception_record.CAPTURE_WAIT_SECS <= 2.0
    monkeypatch.setattr(exception_record, "CAPTURE_WAIT_SECS", 0.2)
    listener.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    hit(ValueError("odd"))
    assert 0.2 <= time.monotonic() - started < LONG


def test_secrets_and_prompts_are_taken_out_of_the_exception(listener: Listener, short_folder: Path) -> None:
    args = SimpleNamespace(api_key="S3CRET-key")
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="r", origin_input_text="tell me of the canary")])
    hit(ValueError("S3CRET-key, HF_TOKEN=S3CRET2: tell me of the canary"), cur_batch=batch, server_args=args)
    assert listener.heard()["message"] == "ValueError: <redacted>, HF_TOKEN=<redacted> <redacted>"
    text = json.dumps(read_record(short_folder))
    assert "S3CRET" not in text
    assert "canary" not in text


def trace_of(action: Callable[..., None], *args: Any) -> TracebackType | None:
    try:
        action(*(args or (ValueError("x"),)))
    except ValueError:
        return sys.exc_info()[2]
    return None


def request(text: Any) -> SimpleNamespace:
    return SimpleNamespace(origin_input_text=text)


@pytest.mark.parametrize("name", ["cur_batch", "cur_batch_for_debug"])
def test_the_batch_at_work_comes_before_the_decoded(name: str) -> None:
    prefill, decode = SimpleNamespace(reqs=[request("new")]), SimpleNamespace(reqs=[request("old")])
    scheduler = Scheduler(**{"running_batch": decode, name: prefill})
    assert next(find_batches(trace_of(scheduler.run_batch))) == (scheduler, prefill)
    assert find_prompts(trace_of(scheduler.run_batch)) == ["new", "old"]
    idle = Scheduler(**{"running_batch": decode, name: None})
    assert next(find_batches(trace_of(idle.run_batch))) == (idle, decode)


def test_without_these_it_is_the_one_that_the_function_was_given() -> None:
    given, decode = SimpleNamespace(reqs=[request("new")]), SimpleNamespace(reqs=[request("old")])

    class Running(Scheduler):
        def event_loop(self, error: BaseException) -> None:
            batch = decode
            assert batch
            self.step(given, error)

        def step(self, batch: Any, error: BaseException) -> None:
            assert batch
            self.run_batch(error)

    scheduler = Running(running_batch=decode)
    assert next(find_batches(trace_of(scheduler.event_loop))) == (scheduler, given)
    assert find_prompts(trace_of(scheduler.event_loop)) == ["new", "old"]


def test_prompts_are_of_batch_queue_and_tokenizer() -> None:
    scheduler = Scheduler(
        cur_batch=SimpleNamespace(reqs=[request("one"), request(None), SimpleNamespace()]),
        waiting_queue=[request("two"), request("")],
    )
    assert find_prompts(trace_of(scheduler.run_batch)) == ["one", "two"]
    states = {n: SimpleNamespace(obj=SimpleNamespace(text=text)) for n, text in enumerate([["a", "b"], "c", None, 5])}
    assert find_prompts(trace_of(Scheduler(rid_to_state=states | {9: object()}).run_batch)) == ["a", "b", "c"]
    assert find_prompts(trace_of(Scheduler().run_batch)) == []


class Tokenized(msgspec.Struct):
    """A request as a scheduler of later releases is sent it, which has no ``__dict__``."""

    input_text: str


class Batch(msgspec.Struct):
    batch: list[Tokenized]


def test_a_request_at_hand_has_a_prompt_too() -> None:
    class Awkward:
        @property
        def text(self) -> str:
            raise RuntimeError

    def dispatch(_one: object, _gone: object, _odd: object, _another: object, _batch: object) -> None:
        raise ValueError("Invalid object")

    asked = SimpleNamespace(input_text="the first", text=None)
    batch = Batch([Tokenized("the third"), Tokenized("the fourth")])
    found = find_prompts(
        trace_of(dispatch, asked, weakref.proxy(Scheduler()), Awkward(), Tokenized("the second"), batch)
    )
    assert found == ["the first", "the second", "the third", "the fourth"]


def test_where_prompts_cannot_be_looked_for_the_message_is_withheld(listener: Listener, short_folder: Path) -> None:
    class Odd:
        def __iter__(self) -> Any:
            raise RuntimeError

    hit(ValueError("tell me of the canary"), waiting_queue=Odd())
    assert listener.heard()["message"] == "ValueError: <redacted>"
    assert "canary" not in json.dumps(read_record(short_folder))


def test_prompts_are_not_without_end() -> None:
    scheduler = Scheduler(waiting_queue=[request(f"prompt {n}") for n in range(1000)])
    assert len(find_prompts(trace_of(scheduler.run_batch))) == 64


# -- threads that end


def raise_in_thread(error: BaseException) -> None:
    raise error


def lose(error: BaseException, name: str) -> None:
    thread = threading.Thread(target=raise_in_thread, args=(error,), name=name)
    thread.start()
    thread.join(LONG)


def serve(printed: int, *, of_all: bool) -> None:
    """Be a process of a server that loses threads; an earlier hook writes their names."""

    def before(args: threading.ExceptHookArgs) -> None:
        os.write(printed, f"{args.thread.name} ".encode())

    threading.excepthook = before
    watch_threads(of_all=of_all)
    watch_threads(of_all=of_all)
    lose(SystemExit(1), "leaves")
    lose(ValueError("no such page"), "first")
    lose(ValueError("no such page"), "again")
    lose(KeyError("room"), "another")


@pytest.mark.parametrize(("of_all", "told"), [(True, ["first", "another"]), (False, [])])
def test_each_way_to_die_is_told_once_and_the_hook_before_is_called(
    listener: Listener, short_folder: Path, of_all: bool, told: list[str]
) -> None:
    read, write = os.pipe()
    process = CONTEXT.Process(target=serve, args=(write,), kwargs={"of_all": of_all})
    process.start()
    os.close(write)
    process.join(LONG)
    heard = listener.heard_so_far()
    assert [message["thread"] for message in heard] == told
    assert [message["message"] for message in heard] == ["ValueError: no such page", "KeyError: 'room'"][: len(told)]
    assert {Path(message["record"]) for message in heard} == set((short_folder / "spool").iterdir())
    with os.fdopen(read) as printed:
        assert printed.read().split() == ["leaves", "first", "again", "another"]
