"""What files of plain text hold, as events: whatever carried their lines."""

from __future__ import annotations

import asyncio
import gzip
import json
import textwrap
import traceback
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_crashkit.errors import CrashkitError, NothingToDoError
from sglang_crashkit.model.case import case_of
from sglang_crashkit.model.event import Collective, Exit, Gpu, Kernel, Line, Progress, Raised, Stack, Stop, Unread
from sglang_crashkit.model.sample import Frame, Thread
from sglang_crashkit.sources.text.reader import read

#: Writes a text into a file, and returns the events of a class that are in it.
Told = Callable[..., list[Any]]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    def read_text(text: str, kind: type = object) -> list[Any]:
        path = tmp_path / "server.log"
        path.write_text(text)
        return [one for one in read([path]) if isinstance(one, kind)]

    return read_text


LOG = """\
[2026-10-05 08:00:01 TP0] Decode batch. #running-req: 2, #token: 90, gen throughput (token/s): 9.1, #queue-req: 0,
[2026-10-05 08:00:02 TP1] Decode batch. #running-req: 2, #token: 90, gen throughput (token/s): 9.1, #queue-req: 0,
[2026-10-05 08:00:03 TP0] Decode batch. #running-req: 3, #token: 95, gen throughput (token/s): 9.1, #queue-req: 4,
[2026-10-05 08:00:04 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/managers/scheduler.py", line 10, in run_scheduler_process
    scheduler.event_loop_normal()
  File "/opt/sglang/srt/mem_cache/allocator.py", line 20, in free
    raise RuntimeError("twice")
RuntimeError: twice

[2026-10-05 08:00:05] INFO:     10.0.0.1:5000 - "POST /generate HTTP/1.1" 500 Internal Server Error
"""

CARRIERS = {
    "plain": "{}",
    "kubectl": "2026-10-05T08:00:09.000000000Z {}",
    "CRI": "2026-10-05T08:00:09.123456789+00:00 stderr F {}",
    "compose": "sglang-1  | {}",
    "srun": "0: {}",
    "journal": "Oct 05 08:00:09 host-1 python3[77]: {}",
    "Ray": "(Engine pid=77, ip=10.0.0.1) {}",
    "colours": "\x1b[33m{}\x1b[0m",
    "quoted": "> {}",
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_carrier_changes_nothing(told: Told, carrier: str) -> None:
    case = case_of(told("".join(CARRIERS[carrier].format(line) + "\n" for line in LOG.splitlines())))

    progress = {
        (one.who, one.kind): (one.count, one.last_order, one.running, one.queued, one.last_at - one.at)
        for one in case.events
        if isinstance(one, Progress)
    }
    assert progress == {
        ("TP0", "decode"): (2, 3, 3, 4, 2.0),
        ("TP1", "decode"): (1, 2, 2, 0, 0.0),
        ("", "failed"): (1, 11, 0, 0, 0.0),
    }
    (raised,) = [one for one in case.events if isinstance(one, Raised)]
    assert (raised.who, raised.error.type, raised.error.text) == ("TP1", "RuntimeError", "twice")
    assert [frame.function for frame in raised.error.frames] == ["free", "run_scheduler_process"]


TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/sglang/srt/managers/scheduler.py", line 10, in run_batch
    self.forward(batch)
  File "/opt/sglang/srt/lora/lora_manager.py", line 20, in prepare
    raise KeyError(name)
KeyError: 'a'
"""
FORMS = {
    "a logger's prefix": "".join(f"ERROR 10-05 08:00:04 [core.py:7] {line}\n" for line in TRACEBACK.splitlines()),
    "SGLang's prefix": "".join(f"[2026-10-05 08:00:04 TP1] {line}\n" for line in TRACEBACK.splitlines()),
    "JSON": json.dumps({"level": "ERROR", "message": TRACEBACK}) + "\n",
    "indented": textwrap.indent(TRACEBACK, "    "),
    "no indentation": "".join(f"{line.strip()}\n" for line in TRACEBACK.splitlines()),
    "no head": TRACEBACK.partition("\n")[2],
    "the exception first": "KeyError: 'a'\n" + "\n".join(TRACEBACK.splitlines()[1:-1]),
    "a box": """\
╭───────────────── Traceback (most recent call last) ─────────────────╮
│ /opt/sglang/srt/managers/scheduler.py:10 in run_batch                │
│                                                                     │
│ ❱ 10 │   self.forward(batch)                                         │
│ /opt/sglang/srt/lora/lora_manager.py:20 in prepare                   │
╰─────────────────────────────────────────────────────────────────────╯
KeyError: 'a'
""",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_traceback_is_read_in_each_form(told: Told, form: str) -> None:
    (raised,) = told(FORMS[form], Raised)
    assert (raised.error.type, raised.error.text) == ("KeyError", "'a'")
    assert [(frame.function, frame.line) for frame in raised.error.frames] == [("prepare", 20), ("run_batch", 10)]


def test_an_exception_of_a_group_is_read(told: Told) -> None:
    async def refuse() -> None:
        raise RuntimeError("the queue is full")

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())

    try:
        asyncio.run(serve())
    except Exception:  # noqa: BLE001 - a group, which older Pythons do not know by name
        text = f"[2026-10-05 08:00:04] ERROR:    Exception in ASGI application\n{traceback.format_exc()}"
    (raised,) = told(text, Raised)
    assert (raised.error.type, raised.error.text) == ("RuntimeError", "the queue is full")
    assert raised.error.frames[0].function == "refuse"


RAISED_AFTER_TP6 = """\
[2026-10-05 08:00:04 TP6] Load weight begin. avail mem=78.70 GB
Traceback (most recent call last):
  File "/opt/sglang/srt/some.py", line 10, in {}
    begin()
OSError: no such vocabulary
"""
DEAD = "[2026-10-05 08:00:00] Rank 1 scheduler is dead. Please check if there are relevant logs.\n"
CHILD = "[2026-10-05 08:00:00] Child process unexpectedly failed with exitcode={}. pid=211\n"
GDB = """\
Thread 2 (Thread 0x7f (LWP {0}1) "sglang::schedul"):
#0  0x01 in futex_wait () from libc.so.6

Thread 1 (Thread 0x7f (LWP {0}) "sglang::schedul"):
#0  0x02 in cuLaunch () from libcuda.so.1

(gdb) detach
"""
TOP = """\
Collecting samples from 'sglang::scheduler_TP1' (python v3.12.3)
Total Samples 12000
GIL: 99.00%, Active: 100.00%, Threads: 24

  %Own   %Total  OwnTime  TotalTime  Function (filename)
 87.00%  95.00%  104.2s    113.9s   evict (sglang/srt/mem_cache/radix_cache.py:410)
  4.00%   9.00%   4.80s    10.80s   forward (sglang/srt/models/llama.py:30)
  0.00% 100.00%   0.00s    119.9s   event_loop_overlap (sglang/srt/managers/scheduler.py)
"""
TOP_FRAMES = (
    Frame("evict", "sglang/srt/mem_cache/radix_cache.py", 410),
    Frame("event_loop_overlap", "sglang/srt/managers/scheduler.py", 0),
)
AT_PERCENT = """\
Process 12: sglang::scheduler_TP0
Python v3.12.1 (/usr/bin/python3)

Thread 12 (idle): "MainThread"
    wait (threading.py:5)
    forward (my%20app/model.py:10)
"""
AT_PERCENT_FRAMES = (Frame("wait", "threading.py", 5), Frame("forward", "my%20app/model.py", 10))
PS = """\
   2201    2190 Rl+  -                98.2  01:14:02 sglang::schedul sglang::scheduler_TP0
   2203    2190 Tl+  do_signal_stop   71.3  01:14:02 sglang::schedul sglang::scheduler_TP2
"""
QUERY = """\
timestamp, index, pci.bus_id, utilization.gpu [%], memory.used [MiB], memory.total [MiB]
2026/08/04 11:55:01.114, 0, 00000000:9C:00.0, 3 %, 100 MiB, 81559 MiB
2026/08/04 11:55:06.114, 0, 00000000:9C:00.0, 100 %, 70000 MiB, 81559 MiB
2026/08/04 11:55:06.114, 1, 00000000:9D:00.0, [N/A], 70000 MiB, 81559 MiB
"""
EVERYTHING = f"""\
{LOG}
$ py-spy dump --pid 4711
Process 4711: sglang::scheduler_TP3
Python v3.12.3 (/usr/bin/python3.12)

Thread 4711 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2501)

$ dmesg
[12345.678901] NVRM: Xid (PCI:0000:19:00): 79, pid=4711, GPU has fallen off the bus.
"""
DRAINS = "Gracefully exiting... Remaining number of requests {}. Remaining requests remaining_rids=[]."


@pytest.mark.parametrize(
    ("text", "kind", "fields", "expected"),
    [
        (RAISED_AFTER_TP6.format("run_detokenizer_process"), Raised, ("who",), ["detokenizer"]),
        (RAISED_AFTER_TP6.format("init_tokenizer_manager"), Raised, ("who",), ["tokenizer"]),
        (RAISED_AFTER_TP6.format("load_model"), Raised, ("who",), ["TP6"]),
        # The status of a wait is no exit code.
        (CHILD.format(9), Exit, ("code", "signal"), [(None, "SIGKILL")]),
        (CHILD.format(139), Exit, ("code", "signal"), [(None, "SIGSEGV")]),
        (CHILD.format(256), Exit, ("code", "signal"), [(1, "")]),
        (f"{DEAD}[2026-10-05 08:00:00] Exit code: -9\n", Exit, ("who", "signal"), [("TP1", "SIGKILL")]),
        (GDB.format(70) + GDB.format(80), Stack, ("who", "sample.pid"), [("scheduler", 70), ("scheduler", 80)]),
        (TOP, Stack, ("who", "sample.threads"), [("TP1", (Thread("MainThread", None, True, True, TOP_FRAMES),))]),
        (f"{TOP.replace('99.00', '9.9.9')}exited with code -9", Exit, ("signal",), ["SIGKILL"]),
        (AT_PERCENT, Stack, ("who", "sample.main_thread.frames"), [("TP0", AT_PERCENT_FRAMES)]),
        (PS, Stack, ("who", "sample.pid", "sample.state"), [("TP0", 2201, ""), ("TP2", 2203, "T")]),
        (
            QUERY,
            Gpu,
            ("index", "bus", "use", "used_mb"),
            [(0, "0000:9c:00", 100.0, 70000.0), (1, "0000:9d:00", -1.0, 70000.0)],
        ),
        (EVERYTHING, Stack, ("who", "sample.pid"), [("TP3", 4711)]),
        (EVERYTHING, Kernel, ("kind", "number", "pid"), [("xid", 79, 4711)]),
        # A server that drains has not ended yet.
        (DRAINS.format(6), Stop, ("is_end",), [False]),
        (DRAINS.format(0), Stop, ("is_end",), [True]),
        (
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
            Stop,
            ("is_end",),
            [False],
        ),
        ("Stopping sglang.service - SGLang server...", Stop, ("is_end",), [False]),
        ("sglang.service: Deactivated successfully.", Stop, ("is_end",), [True]),
        ("sglang.service: Consumed 3min 41.208s CPU time.", Stop, ("is_end",), []),
        ("sglang.service: Main process exited, code=killed, status=9/KILL", Stop, ("is_end",), []),
        ("", Line, (), []),
    ],
)
def test_what_a_text_holds(told: Told, text: str, kind: type, fields: tuple[str, ...], expected: list[Any]) -> None:
    assert [attrgetter(*fields)(one) for one in told(text, kind)] == expected


@pytest.mark.parametrize(
    "batch",
    [
        "Decode batch, #running-req: 1, #prealloc-req: 5, #transfer-req: {}, #queue-req: 0",
        "Prefill batch, #new-seq: 1, #queue-req: 0, #bootstrap-req: 1, #inflight-req: {}, cuda graph: False",
    ],
)
def test_the_number_of_transfers_has_a_time_since_when_it_does_not_fall(told: Told, batch: str) -> None:
    counts, waits = ((0, 9), (10, 4), (20, 4), (30, 7)), int("bootstrap" in batch)
    lines = (f"[2026-10-05 08:00:{at:02d} TP0] {batch.format(count - waits)}\n" for at, count in counts)
    (progress,) = told("".join(lines), Progress)
    assert (progress.transfers, progress.last_at - progress.transfers_since) == (7, 20.0)


def test_a_line_without_a_time_has_that_of_the_batch_before_it(told: Told) -> None:
    events = told(
        "[2026-10-05 08:00:00] begin\n"
        "[2026-10-05 08:10:00 TP0] Decode batch. #running-req: 1\n"
        "terminate called after throwing an instance of 'std::runtime_error'\n"
    )
    (batch,) = [one for one in events if isinstance(one, Progress)]
    (line,) = [one for one in events if isinstance(one, Line) and one.level == "critical"]
    assert line.at == batch.at > 0


@pytest.mark.parametrize(
    "later",
    [
        "(Trainer pid=9) ray.exceptions.ActorDiedError: The actor died unexpectedly",
        "srun: error: node-1: task 0: Exited with exit code 137",
    ],
)
def test_a_program_without_times_is_as_late_as_the_lines_around_it(told: Told, later: str) -> None:
    task = "0: {}" if later.startswith("srun") else "(Engine pid=77) {}"
    lines = (task.format(line) + "\n" for line in LOG.splitlines())
    events = case_of(told(f"{''.join(lines)}{later}\n")).events
    (raised,) = [one for one in events if isinstance(one, Raised) and one.error.text == "twice"]
    last = max(events, key=lambda one: one.order)
    assert last.place > raised.place
    assert last.at >= raised.at


def test_a_log_without_a_year_is_of_the_year_of_the_one_before(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text(LOG)
    second.write_text("[10-05 08:00:09] Error during execution: connection aborted\n")
    (line,) = [one for one in case_of(read([first, second])).events if isinstance(one, Line) and "aborted" in one.text]
    (raised,) = [one for one in case_of(read([first])).events if isinstance(one, Raised)]
    assert line.at == raised.at + 5.0


OF_SIDES = {
    "prefill": "[2026-10-05 08:00:01 TP0] Prefill batch, #new-seq: 1, #inflight-req: 0, cuda graph: False",
    "decode": "[2026-10-05 08:00:02 TP0] Decode transfer failed for request rank=0 decode_req.req.rid='a'",
}


def test_the_sides_of_a_pair_are_known_by_what_they_say_where_both_are_there(tmp_path: Path) -> None:
    paths = []
    for name, (side, text) in zip("ab", OF_SIDES.items(), strict=True):
        paths.append(tmp_path / name)
        paths[-1].write_text(text + "\n")
        assert {one.side for one in read([paths[-1]])} == {""}, side
    assert {(one.source.partition(":")[0], one.side) for one in read(paths)} == {("a", "prefill"), ("b", "decode")}


def test_what_a_gpu_draws_tells_a_kernel_that_waits(tmp_path: Path) -> None:
    (tmp_path / "query.txt").write_text(
        "index, utilization.gpu [%], power.draw [W], power.limit [W], memory.used [MiB]\n"
        "0, 100 %, 121.40 W, 700.00 W, 129140 MiB\n"
        "1, 100 %, 521.40 W, 700.00 W, 129140 MiB\n"
        "2, 100 %, 1.2.3 W, [N/A], 129140 MiB\n"
        "3, 3 %, 75.00 W, 700.00 W, 129140 MiB\n"
    )
    (tmp_path / "table.txt").write_text(
        "| NVIDIA-SMI 570.86.10    Driver Version: 570.86.10    CUDA Version: 12.8 |\n"
        "|   4  NVIDIA H200                    On  |   00000000:9C:00.0 Off |                    0 |\n"
        "| N/A   38C    P0            119W /  700W |  129140MiB / 143771MiB |    100%      Default |\n"
    )
    found = {one.index: one for one in read([tmp_path]) if isinstance(one, Gpu)}
    assert {index: one.is_waiting for index, one in found.items()} == {0: True, 1: False, 2: False, 3: False, 4: True}
    assert (found[4].watts, found[4].most_watts, found[2].watts) == (119.0, 700.0, -1.0)


def test_what_is_cut_or_missing_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path, missing = tmp_path / "cut.gz", tmp_path / "none.log"
    path.write_bytes(gzip.compress(LOG.encode() * 50)[:-9])
    with pytest.raises(CrashkitError, match=r"cut\.gz cannot be read to its end: Compressed file ended"):
        list(read([path]))
    with pytest.raises(NothingToDoError):
        list(read([missing]))
    problems: list[CrashkitError] = []
    events = list(read([missing, path], problems))
    assert sum(isinstance(one, Raised) for one in events) == 50
    assert problems[0].message == f"there is no file {missing}"
    assert problems[1].message.startswith(f"{path} cannot be read to its end: ")


REQUEST = "[2026-10-05 08:00:02] {}: obj=GenerateReqInput(rid='a1', text='{}', stream=False)\n"


@pytest.mark.parametrize("head", ["Receive", "Finish", "Receive OpenAI"])
@pytest.mark.parametrize(
    "words",
    [
        "python invoked oom-killer",
        "python[123]: segfault at 0 ip 0000 sp 0 error 4 in libcuda.so.1[7f00+1000]",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "Received sigterm. Shutting down",
        "Killed",
        'POST /generate HTTP/1.1" 500 Internal Server Error',
        "server_args=ServerArgs(tp_size=64, nnodes=8)",
    ],
)
def test_what_users_and_the_model_say_is_no_evidence(told: Told, head: str, words: str) -> None:
    text = LOG.partition("[2026-10-05 08:00:02")[0] + REQUEST.format(head, words)
    events = [one for one in told(text) if not isinstance(one, Progress)]
    assert [type(one) for one in events] in ([], [Line])
    assert not any(words[:12] in one.text for one in events)


@pytest.mark.parametrize(
    "text",
    [
        "Name:  pod-a\nContainers:\n    Last State: Terminated\n      Reason: Error\n      Exit Code: --5\n",
        "index, memory.used [MiB], utilization.gpu [%]\n\u00b2, 5 MiB, 3 %\n",
        "NAME READY STATUS RESTARTS AGE\npod-a 1/1 Running " + "9" * 5000 + " 5d\n",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=" + "9" * 5000 + ", OpType=ALLREDUCE)\n",
    ],
)
def test_odd_numbers_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.txt").write_text(text)
    (tmp_path / "server.log").write_text(LOG)
    assert any(isinstance(one, Raised) for one in read([tmp_path / "odd.txt", tmp_path / "server.log"]))


def test_a_binary_file_is_named_as_not_read(tmp_path: Path) -> None:
    path = tmp_path / "core.bin"
    path.write_bytes(b"\x7fELF\0\0\0\0" * 100)
    assert [type(one) for one in read([path])] == [Unread]


_PIECES = st.sampled_from(
    [*LOG.splitlines(), "Process 1: x", 'Thread 1 (idle): "a"', "#0 x () at y:1", '{"log": 1}', ""]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(_PIECES | st.text(max_size=80), max_size=40), st.sampled_from(sorted(CARRIERS)))
def test_no_text_raises(tmp_path: Path, lines: list[str], carrier: str) -> None:
    path = tmp_path / "any.log"
    path.write_text("\n".join(CARRIERS[carrier].format(line) for line in lines), encoding="utf-8", errors="replace")
    case_of(read([path]))


@pytest.mark.parametrize("form", ["{:>6}\t{}", "{}:{}", "{} {}", "{}: {}"])
def test_numbers_of_lines_are_no_part_of_them(told: Told, form: str) -> None:
    lines = LOG.splitlines()
    numbered = case_of(told("".join(form.format(4210 + at, line) + "\n" for at, line in enumerate(lines))))
    plain = case_of(told("".join(f"{line}\n" for line in lines)))
    assert [(type(one), one.who, one.side) for one in numbered.events] == [
        (type(one), one.who, one.side) for one in plain.events
    ]


def test_what_counts_up_may_be_tasks_or_processes(told: Told) -> None:
    tasks = case_of(told("".join(f"{at % 3}: {line}\n" for at, line in enumerate(LOG.splitlines()))))
    assert len({one.node for one in tasks.events}) == 3
    listed = "".join(f"{at} pts/0 S 0:01 sglang::scheduler_TP{at - 100}\n" for at in range(100, 112))
    stacks = [one for one in case_of(told(listed)).events if isinstance(one, Stack)]
    assert {one.who: one.sample.pid for one in stacks} == {f"TP{at - 100}": at for at in range(100, 112)}


def test_a_list_of_processes_names_the_stacks_of_its_pids_alone(told: Told) -> None:
    stack = 'Thread {} (active): "MainThread"\n    recv_requests (sglang/srt/managers/scheduler.py:10)\n\n'
    text = (
        "system+ 4801 99.9 3.1 9999 888 ? Rl 09:58 12:34 sglang::scheduler_TP0\n"
        "4802 sglang::scheduler_TP1\n"
        "    0 4803 C 99 40 - - sglang::scheduler_TP2\n"
        "process 4804 sglang::scheduler_TP3 exited with exit code 1\n"
    )
    case = case_of(told(text + stack.format(4802) + "and another one:\n" + stack.format(4999)))
    stacks = [one for one in case.events if isinstance(one, Stack)]
    assert {one.who: one.sample.pid for one in stacks if one.sample.title} == {"TP0": 4801, "TP1": 4802}
    assert [one.who for one in stacks if one.sample.threads] == ["TP1", ""]


def test_the_clock_of_a_carrier_does_not_count_beside_the_logs_own(told: Told) -> None:
    lines = ["NCCL WARN before the first line of the log failed", *LOG.splitlines()]
    case = case_of(told("".join(f"2031-01-01T00:00:00.000000000Z {line}\n" for line in lines)))
    assert case.last_at < 1_900_000_000
    assert [one.at for one in case.events if isinstance(one, Line) and "NCCL" in one.text] == [0.0]


def test_each_program_behind_a_carrier_has_its_own_time_zone(told: Told) -> None:
    text = (
        "prefill-1  | 2026-10-05T10:00:03.5Z [2026-10-05 18:00:03 TP0] Load weight begin.\n"
        "decode-1  | 2026-10-05T10:00:04.5Z [2026-10-05 10:00:04 TP0] Load weight begin.\n"
        "prefill-1  | 2026-10-05T10:00:05.5Z [2026-10-05 18:00:05 TP0] Load weight end.\n"
        "decode-1  | 2026-10-05T10:00:30.5Z NCCL WARN Call to connect failed\n"
        "prefill-1  | 2026-10-05T10:00:31.5Z NCCL WARN Call to connect failed\n"
    )
    lines = [one for one in case_of(told(text)).events if isinstance(one, Line) and "NCCL" in one.text]
    hours = {one.side: one.at % 86400 // 3600 for one in lines}
    assert hours == {"decode": 10, "prefill": 18}


def test_a_time_in_front_of_all_does_not_hide_the_carrier_behind_it(told: Told) -> None:
    case = case_of(told("".join(f"2026-10-05T08:00:09Z decode-1  | {line}\n" for line in LOG.splitlines())))
    assert {one.side for one in case.processes.values() if one.who} == {"decode"}


def test_a_dump_of_the_flight_recorder_tells_the_last_collectives(tmp_path: Path) -> None:
    # As PyTorch 2.11 on a GPU writes it, less what is not read.
    entry = {
        "record_id": 0, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "is_p2p": False,
        "collective_seq_id": 1, "input_sizes": [[1024]], "state": "completed", "time_created_ns": 1795763989406156326,
    }  # fmt: skip
    started = entry | {"record_id": 1, "collective_seq_id": 2, "state": "started"}
    groups = {"0": {"name": "0", "desc": "tp:0", "ranks": "[0, 1]"}}
    (tmp_path / "fr_1.json").write_text(
        json.dumps({"version": "2.10", "pg_config": groups, "entries": [entry, started]})
    )
    found = [one for one in read([tmp_path / "fr_1.json"]) if isinstance(one, Collective)]
    assert [(one.who, one.group, one.number, one.operation, one.state) for one in found] == [
        ("TP1", "tp:0", 1, "all_reduce", "completed"),
        ("TP1", "tp:0", 2, "all_reduce", "started"),
    ]


def test_a_source_is_a_line_of_its_own_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"node{number}.log" for number in range(3)]
    for path in paths:
        path.write_text(f"first\n{LOG}")
    raised = [one.source for one in read(paths) if isinstance(one, Raised)]
    assert raised == ["node0.log:5", "node1.log:5", "node2.log:5"]


DUMP = """\
Fatal Python error: Segmentation fault

Current thread 0x0000726fb547b1c0 (most recent call first):
  File "/opt/sglang/srt/model_loader/loader.py", line 351 in load_weights
  File "/opt/sglang/srt/managers/scheduler.py", line 108 in run_scheduler_process
"""


@pytest.mark.parametrize(("lines_cut", "fatal"), [(0, "Segmentation fault"), (2, "a signal"), (3, "a signal")])
def test_a_dump_of_faulthandler_without_its_head_is_of_a_process_that_died(
    told: Told, lines_cut: int, fatal: str
) -> None:
    text = "".join(DUMP.splitlines(keepends=True)[lines_cut:])
    (found,) = told(text, Stack)
    assert (found.fatal, found.is_cut) == (fatal, lines_cut > 0)
    assert [frame.function for frame in found.sample.threads[0].frames] == ["load_weights", "run_scheduler_process"]
    # In the midst of a log somebody asked for it.
    (found,) = told(f"a line\n{text}", Stack)
    assert found.fatal == (fatal if lines_cut == 0 else "")


def test_what_failed_or_is_advised_is_no_stage_and_a_traceback_may_lack_its_files(told: Told) -> None:
    text = "Exception: Capture cuda graph failed: nvcc is too old\n3. disable torch compile by not using it\n"
    (raised,) = [one for one in told(text) if not isinstance(one, Line)]
    assert isinstance(raised, Raised)
    assert raised.error.type == "Exception"
    (raised,) = told("Traceback (most recent call last):\n    pool.get(\nTypeError: get() takes no argument\n", Raised)
    assert raised.error.text == "get() takes no argument"


def test_a_page_of_metrics_shows_a_server_at_work(told: Told) -> None:
    found = told('sglang:gen_throughput{tp_rank="0"} 0.84\nsglang:num_queue_reqs{tp_rank="0"} 3\n', Progress)
    assert {one.kind: one.queued for one in found} == {"decode": 0, "load": 3}
