from __future__ import annotations

import os
import subprocess
import sys

from unit.waiting import LONG

HEAD = "from sglang_crashkit.srt import server_log\n"


def test_a_reader_of_standard_error_that_reads_nothing_holds_nobody_up() -> None:
    code = HEAD + "server_log.say(b'x' * 200_000)\nprint('on')"
    reader, writer = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, timeout=LONG)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.stdout == b"on\n"


def test_a_line_is_one_line_and_is_cut() -> None:
    code = HEAD + "server_log.say_line('a\\nb\\x1b[31m\\udcff')\nserver_log.say_line('x' * 10_000)"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=LONG, text=True)
    first, second = done.stderr.splitlines()
    assert first == "crash kit: a b [31m "
    assert len(second) == 4000


def test_a_line_that_nobody_reads_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = HEAD + "server_log.say_line('x')\nprint('on')"
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, timeout=LONG)
    finally:
        os.close(writer)
    assert done.stdout == b"on\n"
