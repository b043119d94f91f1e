from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_crashkit.capture.faulthandler_output import parse_faulthandler
from sglang_crashkit.model.sample import Frame

MAIN, OTHER = 0x7F00, 0x7E00
WHOLE = """Fatal Python error: Segmentation fault

Thread 0x0000000000007e00 (most recent call first):
  File "/site/threading.py", line 320 in wait
  File "/site/threading.py", line 1002 in _bootstrap

Current thread 0x0000000000007f00 (most recent call first):
  File "/site/sglang/srt/managers/scheduler.py", line 12 in forward
  File "<string>", line 1 in <module>

Extension modules: numpy.core, torch._C (total: 2)
"""


def parse(text: str, main: int = MAIN, roots: tuple[str, ...] = ()):
    return parse_faulthandler(text, 100, main, roots)


def test_the_error_the_threads_and_their_frames_are_read() -> None:
    output = parse(WHOLE, roots=("/site",))
    assert output.error == "Segmentation fault"
    assert output.is_whole
    main, other = output.threads
    assert (main.name, main.native_id, main.active) == ("MainThread", 100, True)
    assert main.frames == (
        Frame("forward", "sglang/srt/managers/scheduler.py", 12),
        Frame("<module>", "<string>", 1),
    )
    assert (other.name, other.native_id, other.active) == ("", None, False)


def test_the_thread_that_hit_the_error_comes_first() -> None:
    output = parse(WHOLE, main=OTHER)
    assert [thread.native_id for thread in output.threads] == [None, 100]
    assert [thread.active for thread in output.threads] == [True, False]


def test_paths_are_shortened_by_the_longest_folder_of_modules() -> None:
    text = WHOLE.replace("/site/", "/checkout/env/site/")
    (frame, *_rest) = parse(text, roots=("/checkout", "", "/checkout/env/site/")).threads[0].frames
    assert frame.file == "sglang/srt/managers/scheduler.py"


@pytest.mark.parametrize("length", range(0, len(WHOLE), 7))
def test_whatever_was_cut_off_is_read_as_far_as_it_goes(length: int) -> None:
    output = parse(WHOLE[:length])
    whole = parse(WHOLE)
    ended = "in <module>\n" in WHOLE[:length]
    assert output.is_whole == ended
    frames = [frame for thread in output.threads for frame in thread.frames]
    known = [frame for thread in whole.threads for frame in thread.frames]
    assert all(frame in known for frame in frames)


def test_a_stack_deeper_than_it_prints_is_whole() -> None:
    text = f"Thread 0x{MAIN:016x} (most recent call first):\n" + '  File "/x.py", line 1 in f\n' * 100
    assert not parse(text).is_whole
    assert parse(text + "  ...\n").is_whole


def test_names_of_later_pythons_and_unknown_lines_are_taken() -> None:
    text = f"Thread 0x{OTHER:016x} [worker] (most recent call first):\n  <no Python frame>\n"
    text += f'\nCurrent thread 0x{MAIN:016x} [python] (most recent call first):\n  File "/x.py", line ??? in <module>\n'
    output = parse(text)
    assert [thread.name for thread in output.threads] == ["worker", "MainThread"]
    assert output.threads[1].frames == (Frame("<module>", "/x.py", 0),)
    # It was asked for its stack, which says nothing about who was at work.
    assert not any(thread.active for thread in output.threads)
    assert (output.error, output.is_whole) == ("", True)


@pytest.mark.parametrize("text", ["", "\n", "rubbish\n", "  ...\n", '  File "/x.py", line 1 in f\n', "\0" * 100])
def test_anything_else_holds_nothing(text: str) -> None:
    output = parse(text)
    assert (output.threads, output.is_whole, output.error) == ((), False, "")


def test_what_this_python_writes_is_read() -> None:
    code = "import faulthandler, os, sys, threading\n"
    code += "def wait_long(): threading.Event().wait()\n"
    code += "threading.Thread(target=wait_long, daemon=True).start()\n"
    code += "print(threading.main_thread().ident, flush=True)\n"
    code += "def fall(): faulthandler._sigsegv()\nfaulthandler.enable()\nfall()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    output = parse_faulthandler(done.stderr, 100, int(done.stdout))
    assert (output.error, output.is_whole) == ("Segmentation fault", True)
    assert [frame.function for frame in output.threads[0].frames] == ["fall", "<module>"]
    assert "wait_long" in [frame.function for frame in output.threads[1].frames]
