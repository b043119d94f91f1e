"""Reads events from text files: the content shows the kind of evidence, and one file may contain all kinds."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import re
import sys
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from sglang_crashkit.errors import CrashkitError, NothingToDoError
from sglang_crashkit.kernel.private_files import files_below, open_regular
from sglang_crashkit.model import snapshot
from sglang_crashkit.model.event import (
    Arguments,
    Collective,
    Error,
    Event,
    Exit,
    GpuKernel,
    Kernel,
    Line,
    LineLevel,
    Progress,
    Raised,
    Stack,
    Stage,
    Stop,
    Unread,
)
from sglang_crashkit.model.flight_dump import MAX_BYTES, FlightDumpError
from sglang_crashkit.model.sample import Sample, parse_pyspy
from sglang_crashkit.redact import redact_json, redact_text
from sglang_crashkit.sources.text import (
    cluster,
    crash_dumps,
    facts,
    kernel_lines,
    recorders,
    snapshots,
    stacks,
    tracebacks,
)
from sglang_crashkit.sources.text.carriers import MAX_LINE, Carried, Carrier, kernel_time, seconds

_RANKS = r"(?:PP|DP|TP|EP|ATTN_CP|MOE_DP|ATTN_TP|CP|EDP)\d{1,5}"
#: The part of a line of --log-requests before the text of users and the model.
_REQUEST = re.compile(r"(?:Receive(?: OpenAI)?|Finish): obj=\w{0,80}(?:\(rid='?[\w-]{0,80})?")
_OWN = re.compile(
    r"\[(?P<at>(?:(?:\d{4}-)?\d\d-\d\d )?\d\d:\d\d:\d\d)(?:[,.]\d{1,6})?(?P<who> [^\]\[]{1,60})?\] ?"
    r"(?:\[\w{1,60}\.py:\d{1,6}\] ?)?(?:\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\]:? ?)?"
)
#: SGLang's prefix in a pasted line from which the time was removed.
_OWN_RANKS = re.compile(rf"(?P<at>)\[ ?(?P<who>(?:{_RANKS} ?){{1,5}})\] ?(?=\S)")
#: The format of another logger, such as ``2026-10-05 08:00:00 INFO 77 [DP3 TP3 scheduler.py:310] …``.
_LOGGED = re.compile(
    r"\[?(?P<at>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d{1,9})?\]?,? (?:- )?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL),? )?(?:\d{1,8} )?"
    rf"\[(?P<who>(?:{_RANKS} ?){{0,6}}(?:\w{{1,60}}\.py:\d{{1,6}})?)\] "
)
#: The date for times without a date or a year (older releases, other programs) if no other line has one.
_NO_DATE = "1970-01-01 00:00:00"
_OTHER = re.compile(r"\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)\]?[ :,-]")
_DATE = re.compile(
    r"\b((?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d)(?: [AP]M)?(?: [A-Z]{3,4})? (20\d\d)\b"
)
#: Glog's prefix; PyTorch's form has no zero before the month.
_GLOG = re.compile(r"(?:\[rank\d{1,5}\]:)?\[?[IWEF]\d{3,4}(?:\d{4})? (\d\d:\d\d:\d\d)")
_AGREES_S = 900.0
#: A process in a list of ``ps``, ``pgrep -a`` or ``top``, with its state where the list has it.
_LISTED = re.compile(
    r"(?:[a-z_][\w+-]{0,31} +| *)(?P<pid>[1-9]\d{0,7}) (?:.{0,160}?(?<=\s)(?P<state>[TtDZX])[LNsl+<]{0,5} )?.{0,200}"
    r"(?P<title>sglang::\S{1,80})"
)
_HEADING = re.compile(rf"[\W_]{{0,40}}((?:{_RANKS}[ _]?){{1,5}})[\W_]{{0,40}}$")
_RANK = re.compile(r"\[?\[?[Rr]ank ?(\d{1,5})\]?:?\]?:? ?")
_RANK_BEHIND_A_BAR = re.compile(r"\]\[rank(\d{1,5})\]:\[")
_PROCESS = re.compile(r"Process ([\w:.-]{1,120}):$")
_THREAD = re.compile(r"Exception in thread ([^:]{1,120}):")
_PREFIXED_FRAME = re.compile(r'([^|+]{1,160}?)(?=  File "[^"]{1,600}", line \d)')
_BETWEEN_LINES = re.compile(r"\n|(?<=(?:it/s|s/it)\])(?=\[\d{4}-\d\d-\d\d )")
#: The beginning of the output of ``py-spy dump --json``.
_PYSPY = re.compile(rb"\s*\[\s*\{")
_FENCE = re.compile(r"\s*(?:```|~~~)")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_WORK = re.compile(
    r"SeqNum=(?P<number>\d{1,18}), OpType=(?P<operation>\w+)(?:, NumelIn=(?P<sizes>\d+))?.{0,120}?"
    r"ran for (?P<ms>\d+) milliseconds"
)
_GROUP = re.compile(r"PG (?:ID|GUID) (\S{1,60})(?:[^\]]{0,80} Rank (\d{1,5})\])?")
_CUDA_EXCEPTION = re.compile(r"(CUDA_EXCEPTION_\d+)[:, ]+(.{1,80}?)(?:\.|\)|$)")
_CUDA_KERNEL = re.compile(
    r"\*? +\d+ +\S+ +(\d+) +\d+ +(?:Active|Pending|Sleeping)\b.{0,200}?\) ?(?:\([\d, ]{1,40}\) ?)?(\S.{0,600})$"
)
_RUNNING = re.compile(r"#running-req: (\d+)")
_QUEUED = re.compile(r"#queue-req: (\d+)")
_LOAD = re.compile(r'"num_waiting_reqs": ?(\d{1,9})\b|sglang:num_queue_reqs\{[^}]{0,400}\} (\d{1,9})')
#: A page of metrics of a server that generates tokens.
_AT_WORK = re.compile(r"sglang:gen_throughput\{[^}]{0,400}\} (?:[1-9]|0\.0{0,6}[1-9])")
_OF_SIDE = re.compile(
    r"(?:\[[^\]]{0,60}\] )?(?:(Prefill|Decode) (?:transfer|bootstrap|handshake) failed"
    r"|(Prefill) batch.{0,300}#inflight-req|(Decode) batch.{0,300}#(?:transfer|prealloc)-req)"
)
#: Transfers of a pair in flight: of a decode server; of a prefill server, with the requests that wait for a transfer.
_TRANSFERS = re.compile(rb"#transfer-req: (\d+)|#(?:prealloc|bootstrap)-req: (\d+), #inflight-req: (\d+)")
#: Control requests of an operator or a trainer, which need no batch.
_CONTROL = re.compile(
    r"/(?:pause|continue)_generation|/\w*weights\w*|/(?:un)?load_lora_adapter|/flush_cache|/\w*_memory_occupation"
    r"|/\w+_profile|/set_internal_state|/(?:attach|detach|clear)_hicache\w*"
)
#: Lines of libraries rather than SGLang: NCCL, gloo, C++, HIP, Rust, glog.
_LIBRARY = re.compile(
    r"NCCL (?:WARN|INFO|ERROR)|ProcessGroupNCCL|\bncclInternalError\b|nccl\w{0,30}Error|\bgloo[/:]|\[enforce fail at"
    r"|ProcessGroupGloo|terminate called|^\s*what\(\):|Aborted \(core|Memory access fault by GPU|\bHIP error\b|\bROCr\b"
    r"|:0:rocdevice|panicked at|RUST_BACKTRACE|^[IWEF]\d{4}(?:\d{4})? \d\d:\d\d:\d\d"
)
#: Functions that run only in one process whose log lines have no name; a rank's line may come before its traceback.
_WITHOUT_A_NAME = {"run_detokenizer_process": "detokenizer", "init_tokenizer_manager": "tokenizer"}
#: Most bytes of a dump or a snapshot, and of other JSON; most files in a folder; most distinct lines in a file.
_MAX_WHOLE, _MAX_JSON, _MAX_FILES, _MAX_LINES = 64 << 20, 8 << 20, 4096, 4000
#: Most characters of a message; most lines after its first one, and most characters of each.
_MAX_MESSAGE, _MAX_MORE, _MAX_MORE_LINE = 2000, 12, 300
#: The number of last harmless lines, and of last batches, that are kept of each process.
_LAST_LINES = _LAST_BATCHES = 100
_HEAD = 400
_Made = TypeVar("_Made", bound=Event)
#: Most bytes of a line of a batch or of the web server; the rest of a longer line is a path.
_MAX_BATCH = 600
#: A line of a batch or of an answered request, after SGLang's own time; and a carrier's time before that.
_USUAL = re.compile(
    rb"(?P<before>.{0,120}?)\[(?P<at>20\d\d-\d\d-\d\d \d\d:\d\d:\d\d)(?P<who>[^\]]{0,80})\] "
    rb"(?:(?P<batch>Decode|Prefill) batch|INFO: [^\"]{1,72}(?P<answer>\".{1,400}))"
)
_CARRIER_TIME = re.compile(rb"20\d\d-\d\d-\d\dT\S{1,40} (?:std(?:out|err) [FP] )?")
_ZIPPED = b"\x1f\x8b"


def read(
    paths: Sequence[Path],
    problems: list[CrashkitError] | None = None,
    *,
    beside: Sequence[Path] = (),
) -> Iterator[Event]:
    """Yield the events of files, in the order of the files; of a file that is cut off, the events up to there.

    Args:
        paths: the files, pipes and folders that the user named; ``-`` is the standard input.
        problems: receives the errors of files that cannot be read, or not to their end, if others can.
        beside: files that the user did not name, such as an incident's; only regular files and folders are read.

    Raises:
        NothingToDoError: a path does not exist, and `problems` is None or no file can be read.
        CrashkitError: a file cannot be read, under the same conditions.
    """
    readers, order, date = [], 0, _NO_DATE
    met: list[CrashkitError] = []
    for path, is_named in [*((path, True) for path in paths), *((path, False) for path in beside)]:
        try:
            files = list(_files(path, met, is_named=is_named))
        except NothingToDoError as error:
            met.append(error)
            continue
        for file, is_pipe in files:
            reader = _File(file, order, is_pipe, date=date)
            try:
                reader.read()
            except CrashkitError as error:
                met.append(error)
                if not reader.understood:
                    continue
            readers.append(reader)
            order, date = reader.order + 1, reader.date
    if met and (problems is None or not readers):
        raise met[0]
    if problems is not None:
        problems += met
    yield from _placed(readers)


def _pyspy_stacks(data: bytes) -> Iterator[Stack]:
    threads = parse_pyspy(data.decode(errors="replace"))
    main = next((one for one in threads if one.name == "MainThread"), threads[0])
    yield Stack(sample=Sample(pid=main.native_id or 0, threads=threads))


def _files(path: Path, met: list[CrashkitError], *, is_named: bool) -> Iterator[tuple[Path, bool]]:
    """Yield the files that a path stands for, each with whether it is a pipe, which is read to its end."""
    if str(path) == "-":
        yield path, True
    elif path.is_dir():
        yield from ((one, False) for one in files_below(path, met)[:_MAX_FILES])
    elif path.is_file():
        yield path, False
    elif is_named and path.is_fifo():
        # Such as /dev/fd/63, the shell's form of <(zcat log.gz).
        yield path, True
    elif is_named:
        what = f"{path} is no file and no pipe" if path.exists() else f"there is no file {path}"
        raise NothingToDoError(what, next_step=f"ls -l {path.parent}")


@dataclass
class _Stream:
    """The state of reading the lines of one program in a file, which the carrier's key identifies."""

    at: float = 0.0
    has_own_time: bool = False
    ahead: float | None = None  # SGLang's clock minus the carrier's, in seconds, by the last line that has both times
    who: str = ""  # of the last line that named a process
    names: set[str] = field(default_factory=set)  # the first two of these names
    thread: str = ""
    said: str = ""  # the last line before a traceback
    more: list[str] = field(default_factory=list)  # the lines without a prefix that follow SGLang's last line
    traceback: tracebacks.Traceback | None = None
    prefix: re.Pattern[str] | None = None  # the prefix that another program's logger puts before each line of it
    block: stacks.StackBlock | None = None
    headed: str = ""  # the rank's name, if the line before the stack contains nothing else
    started: tuple[float, int] = (0.0, 0)  # time and order of the first line of the traceback or the block


@dataclass
class _Batches:
    at: float
    order: int
    count: int = 0
    last: bytes = b""
    last_order: int = 0
    last_at: float = 0.0
    recent: deque[tuple[float, bytes]] = field(default_factory=lambda: deque(maxlen=_LAST_BATCHES))  # time and line

    def transfers(self) -> tuple[int, float]:
        """Return the number of transfers of a pair in flight, and since when that number has not fallen."""
        now, since = 0, 0.0
        for at, line in self.recent:
            found = _TRANSFERS.search(line)
            before, now = now, sum(int(one or 0) for one in found.groups()) if found else 0
            since = at if now < before or not before or not since else since
        return now, since if now else 0.0


@dataclass
class _File:
    path: Path
    order: int
    is_pipe: bool
    has_own_clock: bool = False  # its lines have SGLang's own time, which may differ from the carrier's
    ahead: float | None = None  # that of any stream, for streams without a line that has both times
    events: list[tuple[str, Event]] = field(default_factory=list)  # each with the key of its stream
    streams: dict[str, _Stream] = field(default_factory=lambda: defaultdict(_Stream))
    batches: dict[tuple[str, str, str, int], _Batches] = field(default_factory=dict)
    lines: dict[tuple[str, str, LineLevel, str], list[Any]] = field(default_factory=dict)
    last: dict[tuple[str, str], deque[Line]] = field(default_factory=dict)
    #: Exceptions without a traceback, each with the lines after it: in SGLang's lines, and in other lines.
    raised: list[tuple[str, Raised, list[str]]] = field(default_factory=list)
    bare: list[tuple[str, Raised, list[str]]] = field(default_factory=list)
    date: str = _NO_DATE  # the last time with a date, at first the file's first one, else the previous file's
    time: float = 0.0  # of the last line with a time
    sample: str = ""  # the first line of the file, shown if nothing in it is understood
    understood: bool = False
    broken: Exception | None = None  # the error that ended the reading

    def __post_init__(self) -> None:
        self.before = self.order  # the order before its first line

    def read(self) -> None:
        """Read the whole file into `events`."""
        for step in (self._read_all, self._end):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - a bad file must not stop the others
                self.broken = self.broken or error
        if self.broken is not None:
            why = getattr(self.broken, "strerror", None) or self.broken
            much = " to its end" if self.understood else ""
            raise CrashkitError(f"{self.path} cannot be read{much}: {why}", next_step=f"ls -l {self.path}")

    def _read_all(self) -> None:
        with self._open() as opened:
            head = self._some(opened, 1 << 16)
            if not self._special(head, opened):
                self._read_lines(head, opened)

    def _some(self, opened: BinaryIO, most: int) -> bytes:
        """Return up to `most` bytes of the file: fewer at its end, or where a file is cut off."""
        found = b""
        while len(found) < most and self.broken is None:
            try:
                chunk = opened.read1(most - len(found))  # type: ignore[attr-defined]
            except (OSError, EOFError, zlib.error) as error:
                self.broken = error
                break
            if not chunk:
                break
            found += chunk
        return found

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        source: Any
        if str(self.path) == "-":
            if sys.stdin is None:
                raise OSError(errno.EBADF, "the standard input is closed")
            source = io.BufferedReader(sys.stdin.buffer)
        else:
            # The file may have been replaced since it was found.
            source = self.path.open("rb") if self.is_pipe else open_regular(self.path, follow=True)
        with source as raw:
            if raw.peek(2)[:2] != _ZIPPED:
                yield raw
                return
            with gzip.open(raw, "rb") as opened:
                yield opened

    def _special(self, head: bytes, opened: BinaryIO) -> bool:
        """Read a file that is not lines of text; return whether it was such a file."""
        dump = partial(recorders.collectives_of, path=self.path)

        def look(data: bytes) -> Iterable[Event]:
            return snapshots.stacks_in(snapshot.parse(data))

        # Parsed JSON takes many times the size of its text.
        forms: tuple[tuple[bool, str, Callable[[bytes], Iterable[Event]], int], ...] = (
            (recorders.is_dump(head), "a dump of a flight recorder", dump, MAX_BYTES),
            (crash_dumps.is_dump(head), "a dump of requests", crash_dumps.events_of, _MAX_WHOLE),
            (bool(snapshots.HEAD.match(head)), "a snapshot of collect", look, _MAX_WHOLE),
            (cluster.is_inspection(head), "what Docker says about a container", cluster.inspected, _MAX_JSON),
            (bool(_PYSPY.match(head)) and b'"frames"' in head, "stacks of py-spy", _pyspy_stacks, _MAX_JSON),
        )
        found = next((form for form in forms if form[0]), None)
        text = ""
        if found is not None:
            _is_it, what, events_of, most = found
            try:
                for event in events_of(head + self._some(opened, most)):
                    self._add("", msgspec.structs.replace(event, order=self.order, source=self.path.name))
            except (FlightDumpError, ValueError) as error:
                text = f"{what} that cannot be read: {error}"
        elif b"\0" in head[:4096]:
            kind = "a pickle" if head[:1] == b"\x80" else "binary data"
            text = f"{kind}, which is not read"
        if text:
            self.events.append(("", Unread(order=self.order, source=self.path.name, text=text)))
        return found is not None or bool(text)

    def _read_lines(self, head: bytes, opened: BinaryIO) -> None:
        text = head.decode(errors="replace")
        first = text.splitlines()[:_HEAD]
        year = re.search(r"\b(20\d\d)-\d\d-\d\d", text)
        carrier = Carrier(first, int(year[1]) if year else 0)
        bare = [carrier.strip(line).text for line in first]
        if dated := re.search(r"\[(20\d\d-\d\d-\d\d \d\d:\d\d:\d\d)", text):
            self.date = dated[1]
        self.has_own_clock = any(_OWN.match(line) for line in bare)
        every = [*bare, *(carrier.strip(line).text for line in text.splitlines()[_HEAD:])]
        for is_it, events_of, lines in (
            (cluster.is_description(bare), cluster.containers_of, every),
            (any(map(cluster.PODS.match, bare[:20])), cluster.pods_of, bare),
            (any(cluster.SMI in line for line in bare), cluster.gpus_of, bare),
            (any(map(cluster.QUERY.match, bare[:20])), cluster.queried_gpus_of, bare),
        ):
            for event in events_of(lines) if is_it else ():
                self._add("", msgspec.structs.replace(event, order=self.order, source=self._source()))

        @lru_cache(maxsize=_MAX_LINES)
        def stream_of(before: bytes) -> str | None:
            """Return the stream of a line from the text before SGLang's time; None if that is no carrier's prefix."""
            carried = carrier.strip(f"{before.decode(errors='replace')}[20")
            return carried.stream if carried.text == "[20" and not carried.at else None

        for line in self._split(head, opened):
            self.order += 1
            if self._is_usual(line, stream_of):
                continue
            decoded = line[:MAX_LINE].decode(errors="replace")
            if _FENCE.match(decoded):
                continue
            carried = carrier.strip(decoded)
            # A JSON logger writes a whole traceback in one line; a progress bar does not end its line.
            for part in _BETWEEN_LINES.split(carried.text):
                self._take(replace(carried, text=part))
            if not self.sample and carried.text.strip():
                self.sample = carried.text.strip()[:200]

    def _split(self, head: bytes, opened: BinaryIO) -> Iterator[bytes]:
        rest = head
        while rest:
            *lines, rest = rest.split(b"\n")
            yield from lines
            chunk = self._some(opened, 1 << 20)
            if not chunk:
                if rest:
                    yield rest
                return
            # Of an endless line only the beginning is kept in memory.
            rest = rest[: 2 * MAX_LINE] + chunk

    def _is_usual(self, line: bytes, stream_of: Callable[[bytes], str | None]) -> bool:
        """Take a line of a batch or of an answered request by a fast path; return whether it was such a line."""
        match = _USUAL.match(line)
        if match is None or (key := stream_of(_CARRIER_TIME.sub(b"", match["before"]))) is None:
            return False
        if match["batch"]:
            who, kind, status = _name(match["who"].decode(errors="replace")), match["batch"].decode().lower(), 0
        else:
            answer = _answer(match["answer"])
            if answer is None:
                return False
            who, (kind, status) = "", answer
        at = self.time = seconds(match["at"].decode())
        self._count(key, who, kind, status, line[match.start("at") - 1 :][:_MAX_BATCH], at)
        stream = self.streams[key]
        stream.at, stream.has_own_time = at, True
        if stream.traceback or stream.block:
            self._close(stream, key)
        return True

    def _add(self, key: str, event: Event) -> None:
        self.understood = True
        self.events.append((key, event))

    def _source(self, order: int | None = None) -> str:
        return f"{self.path.name}:{(self.order if order is None else order) - self.before}"

    def _take(self, carried: Carried) -> None:
        text, key = carried.text, carried.stream
        stream = self.streams[key]
        if not stream.has_own_time and not carried.at and self.time:
            # A stream without times, such as srun's own messages, gets the time of the lines around it.
            stream.at = self.time
        # A line of SGLang may quote any text, so kernel messages in it do not count.
        if carried.is_kernel or (kernel_lines.is_telling(text) and not _OWN.match(text.lstrip())):
            self._kernel(carried, key, stream)
            return
        if stream.traceback is not None:
            if stream.prefix is None and (match := _PREFIXED_FRAME.match(text)):
                stream.prefix = re.compile(_NUMBERS.sub(r"\\d+", re.escape(match[1])))
            match = stream.prefix.match(text) if stream.prefix else None
            if match and stream.traceback.take(text[match.end() :]):
                return
        if text[:1] == " " and _OWN.match(text.lstrip()):
            text = text.lstrip()  # indentation of a pasted page
        if 'File \\"' in text:
            text = text.replace('\\"', '"')  # escaped in a JSON string
        own = _OWN.match(text) or _LOGGED.match(text) or _OWN_RANKS.match(text)
        ahead = self.ahead if stream.ahead is None else stream.ahead
        if own:
            self._close(stream, key)
            stream.more = []
            if at := own["at"]:
                self.date = at if len(at) == len(_NO_DATE) else self.date
                stream.at, stream.has_own_time = seconds(self.date[: -len(at)] + at), True
                self.ahead = stream.ahead = stream.at - carried.at if carried.at else None
                self.time = stream.at
            stream.who = _name(own["who"] or "")
            if stream.who and len(stream.names) < 2:
                stream.names.add(stream.who)
            text = text[own.end() :]
            text = request[0] if (request := _REQUEST.match(text)) else text
        elif other := _OTHER.match(text):
            if at := seconds(other[1]):
                stream.at, stream.has_own_time = at, True
                self.time = at
        elif glog := _GLOG.match(text):
            # It has no year and may be in another time zone: use it only if it is close to the lines around it.
            at = stream.at - stream.at % 86400 + seconds(f"1970-01-01 {glog[1]}")
            stream.at = at if abs(at - stream.at) < _AGREES_S else stream.at
        elif (date := _DATE.search(text[:200])) and (at := kernel_time(f"{date[1]} {date[2]}")):
            # The output of `date`: a person looked at the server then.
            stream.at = at
        elif carried.at and ahead is not None and carried.at + ahead > stream.at + 1.0:
            # SGLang's clock has whole seconds, and may be in another time zone than the carrier's.
            stream.at = float(int(carried.at + ahead))
        elif carried.at and not stream.has_own_time and not self.has_own_clock:
            stream.at = carried.at
        if stream.traceback is not None and stream.traceback.take(text):
            return
        if stream.block is not None or stacks.begins(text):
            block, is_taken = stacks.parse(stream.block, text)
            if block is not stream.block:
                self._close(stream, key)
                if block is not None:
                    stream.started = (stream.at, self.order)
                    block.title = stream.said if block.is_bare else block.title
                    # A dump without its head that begins a file is of a process that died; in a log it was requested.
                    block.fatal = "a signal" if block.is_cut and self.order == self.before + 1 else block.fatal
                    stream.headed = _name(match[1].replace("_", " ")) if (match := _HEADING.match(stream.said)) else ""
            stream.block = block
            if is_taken:
                return
        if tracebacks.begins(text):
            self._begin_traceback(text, stream, key)
            return
        self._close(stream, key)
        if text.strip():
            self._line(text, key, stream, is_own=own is not None, program=carried.program)

    def _begin_traceback(self, text: str, stream: _Stream, key: str) -> None:
        self._close(stream, key)
        said = text.partition(tracebacks.HEADER)[0].strip() if tracebacks.HEADER in text else ""
        is_cut = tracebacks.HEADER[:-1] not in text
        before = "" if is_cut and stream.said[:1] == " " else stream.said  # the source line of a frame that was cut off
        stream.traceback = tracebacks.Traceback(said=(said or before)[:400], is_cut=is_cut)
        stream.started = (stream.at, self.order)
        if rank := _RANK.match(text):
            stream.who = stream.who or f"TP{rank[1]}"
        stream.traceback.take(text)

    def _close(self, stream: _Stream, key: str) -> None:
        """End the traceback or the stacks that a stream is in."""
        at, order = stream.started
        source = self._source(order)
        if stream.traceback is not None:
            chain, said = stream.traceback.chain(), stream.traceback.said
            if not chain and stream.who and "hit an exception" in said:
                chain = (Error(type=""),)  # the log ends after this line
            if chain:
                who = facts.subject_of(said) if said.startswith("Process ") else ""
                alone = (_WITHOUT_A_NAME[one.function] for one in chain[0].frames if one.function in _WITHOUT_A_NAME)
                raised = Raised(
                    order=order, at=at, who=next(alone, who) or stream.who, chain=chain, said=said,
                    thread=stream.thread, is_cut=stream.traceback.is_cut, source=source,
                )  # fmt: skip
                self._add(key, raised)
            stream.traceback, stream.prefix, stream.thread, stream.said = None, None, "", ""
        if stream.block is not None:
            block, stream.block = stream.block, None
            told = stacks.ranks_said(block.title) if block.is_bare else []
            block.title = "" if block.is_bare else block.title
            if block.threads or block.fatal:
                sample = block.sample()
                # In a log of several ranks, the line before a fatal signal may be from any of them.
                names = stream.names | {one[1] for one in self.batches if one[0] == key and one[1]}
                near = "" if block.fatal and len(names) > 1 else stream.who
                for who in told or [stacks.who_of(sample.title) or stream.headed or near]:
                    found = Stack(order=order, at=at, who=who, sample=sample, source=source)
                    self._add(key, msgspec.structs.replace(found, fatal=block.fatal, is_cut=block.is_cut))

    def _kernel(self, carried: Carried, key: str, stream: _Stream) -> None:
        found = kernel_lines.parse(carried.text)
        if found is None:
            self.understood = self.understood or carried.is_kernel
            return
        kind, told = found
        name, pid, number = (told.pop(part, "") for part in ("name", "pid", "number"))
        event = Kernel(
            order=self.order, at=carried.at or stream.at, kind=kind, text=carried.text[:400], pid=int(pid or 0),
            name=name, number=int(number or 0), facts=told, source=self._source(),
        )  # fmt: skip
        self._add(key, event)

    def _line(self, text: str, key: str, stream: _Stream, *, is_own: bool, program: str) -> None:
        is_next = not is_own and not stream.more and stream.said.endswith("hit an exception:")
        if is_next and tracebacks.bare_exception(text):
            # The traceback between SGLang's line and this one was left out of the text.
            is_own, stream.more = True, []
        at, who = stream.at, stream.who if is_own else ""

        def make(event: type[_Made], /, **fields: Any) -> _Made:
            place: dict[str, Any] = {"order": self.order, "at": at, "who": who, "source": self._source()}
            return event(**place | fields)

        def add(event: type[Event], /, **fields: Any) -> None:
            self._add(key, make(event, **fields))

        if (is_own and text.startswith(("Decode batch", "Prefill batch"))) or _AT_WORK.match(text):
            self._count(key, who, "prefill" if text[0] == "P" else "decode", 0, text.encode()[:_MAX_BATCH], at)
            return
        access = facts.ACCESS.search(text)
        kind, status = _kind_of(access) if access and "://" not in access[2] else ("", 0)
        if access and access["passed"]:
            # A router's line about an answer of one of its servers, which it does not name.
            kind = "passed" if kind == "answer" and not facts.is_complaint(text) else ""
        if kind:
            self._count(key, "", kind, status, text.encode()[:_MAX_BATCH], at)
            return
        if load := _LOAD.search(text):
            add(Progress, who="", kind="load", queued=int(load[1] or load[2]), text=text[:300])
            return
        if arguments := facts.arguments_of(text):
            add(Arguments, who="", values=arguments)
            return
        if release := facts.release_of(text):
            add(Arguments, who="", release=release)
        listed = _LISTED.match(text) if "sglang::" in text else None
        if listed and (listed["state"] or (listed["title"][-1].isdigit() and not text[listed.end() :].strip())):
            # A rank at the end of a line is in a list, so it is there; a title that is cut off shows only a bad state.
            sample = Sample(pid=int(listed["pid"]), title=listed["title"], state=listed["state"] or "")
            add(Stack, who=stacks.who_of(listed["title"]), sample=sample)
            return
        if match := _PROCESS.match(text):
            stream.who, stream.said = stacks.who_of(match[1]) or stream.who, text
            return
        if match := _THREAD.search(text):
            stream.thread, stream.said = match[1], text
            return
        if not is_own and (rank := _RANK.match(text) or _RANK_BEHIND_A_BAR.search(text[:200])):
            who = f"TP{rank[1]}"
        level = facts.level_of(text)
        if (bare := tracebacks.bare_exception(text)) and level != "info":
            raised = make(Raised, chain=(Error(type=bare[0], text=bare[1][:_MAX_MESSAGE]),))
            stream.more = stream.more if is_own else []
            (self.raised if is_own else self.bare).append((key, raised, stream.more))
        if work := _WORK.search(text):
            group = _GROUP.search(text)
            number = who.removeprefix("TP") or (group[2] if group else "") or ""
            add(
                Collective, group=group[1] if group else "", number=int(work["number"]), state="timeout",
                operation=work["operation"], sizes=work["sizes"] or "", rank=int(number) if number.isdigit() else -1,
            )  # fmt: skip
        if found := _CUDA_EXCEPTION.search(text):
            add(GpuKernel, exception=": ".join(found.groups()), text=text[:400])
        elif kernel := _CUDA_KERNEL.match(text):
            add(GpuKernel, who="", device=int(kernel[1]), name=kernel[2][:400], text=text[:400])
        is_other = facts.OTHER_UNIT.match(text) is not None
        stop = facts.row_of(facts.STOPS, text[:600]) if not is_other else None
        if stop is not None and not (stop[0] == "systemd" and program not in ("systemd", "")):
            add(Stop, by=stop[0], is_end=stop[1], text=text[:400])
        # An exception, or a numbered piece of advice, is not a stage.
        if not bare and text[1:2] != "." and (stage := facts.row_of(facts.STAGES, text[:400])) is not None:
            add(Stage, name=stage[0], is_done=stage[1], text=text[:200])
        if (ended := facts.exit_of(text)) is not None and ended != (0, "") and not is_other:
            # The line before may name the process.
            subject = facts.subject_of(text) or (facts.subject_of(stream.said) if text.startswith("Exit code") else "")
            add(Exit, who=subject, code=ended[0], signal=ended[1], text=text[:400])
        stream.said = text[:400]
        self._keep(text, key, make(Line, text=text[:_MAX_MESSAGE], level=level), stream.more if is_own else [])
        if not is_own and ended is None and not _LIBRARY.search(text[:600]) and len(stream.more) < _MAX_MORE:
            stream.more.append(text[:_MAX_MORE_LINE])

    def _keep(self, text: str, key: str, line: Line, more: list[str]) -> None:
        if line.level in ("info", "debug"):
            self.last.setdefault((key, line.who), deque(maxlen=_LAST_LINES)).append(line)
            return
        likeness = (key, line.who, line.level, _NUMBERS.sub("#", text[:240]))
        if (entry := self.lines.get(likeness)) is not None:
            entry[1:3] = entry[1] + 1, line.at
        elif len(self.lines) < _MAX_LINES:
            self.lines[likeness] = [line, 1, line.at, more]

    def _count(self, key: str, who: str, kind: str, status: int, line: bytes, at: float) -> None:
        if (entry := self.batches.get((key, who, kind, status))) is None:
            entry = self.batches[key, who, kind, status] = _Batches(at, self.order)
        entry.count += 1
        entry.last, entry.last_order, entry.last_at = line, self.order, at
        if kind in ("prefill", "decode"):
            entry.recent.append((at, line))
        self.understood = True

    def _end(self) -> None:
        for key, stream in self.streams.items():
            self._close(stream, key)
        # Other programs' exceptions count only in an excerpt; in a whole log they are unrelated to SGLang.
        is_whole = bool(self.events or self.batches or self.raised)
        for key, raised, more in self.raised if is_whole else self.bare:
            text = "\n".join([raised.error.text, *more])[:_MAX_MESSAGE]
            chain = (Error(type=raised.error.type, text=text),)
            self.events.append((key, msgspec.structs.replace(raised, chain=chain)))
        for (key, who, kind, status), entry in self.batches.items():
            text = entry.last.decode(errors="replace")
            running, queued = _RUNNING.search(text), _QUEUED.search(text)
            transfers, since = entry.transfers()
            self._add(
                key,
                Progress(
                    order=entry.order, at=entry.at, who=who, kind="control" if kind.startswith("/") else kind,
                    count=entry.count, status=status, last_at=entry.last_at, last_order=entry.last_order,
                    running=int(running[1]) if running else 0, queued=int(queued[1]) if queued else 0,
                    transfers=transfers, transfers_since=since, source=self._source(entry.last_order),
                    text=kind if kind.startswith("/") else text[:300],
                ),
            )  # fmt: skip
        for (key, _who, _level, _text), (line, count, last_at, more) in self.lines.items():
            text = "\n".join([line.text, *more])[:_MAX_MESSAGE]
            self.events.append((key, msgspec.structs.replace(line, text=text, count=count, last_at=last_at)))
        for (key, _who), last in self.last.items():
            self.events += [(key, line) for line in last]
        if not self.understood and not self.lines and self.sample:
            self.events.append(("", Unread(order=self.order, source=self.path.name, text=self.sample)))


def _kind_of(access: re.Match[str]) -> tuple[str, int]:
    """Return the kind of progress in a line of the web server, or the path of a control request; and the status."""
    method, path, status = access[1], access[2], int(access["status"])
    # Requests that register a server with a router do not show that the server works.
    if path.startswith(("/health", "/ping", "/readyz", "/livez", "/workers", "/add_worker", "/remove_worker")):
        return "health", status
    if status >= 400:
        return "failed" if status >= 500 else "refused", status
    control = _CONTROL.match(path)
    return control[0] if control else "answer" if method == "POST" else "health", status


@lru_cache(maxsize=_MAX_LINES)
def _answer(text: bytes) -> tuple[str, int] | None:
    """Return `_kind_of` for the end of a line, from the method on; None if the server did not answer there."""
    access = facts.ACCESS.search(text.decode(errors="replace"))
    return _kind_of(access) if access and not access["passed"] else None


@lru_cache(maxsize=_MAX_LINES)
def _name(prefix: str) -> str:
    # The text after the time contains the ranks, and in some releases the module.
    return " ".join(word for word in prefix.split() if re.fullmatch(_RANKS, word))


def _placed(readers: Sequence[_File]) -> Iterator[Event]:
    """Yield the events of all files, each with its node and its side."""
    programs: dict[tuple[int, str], list[Event]] = {}
    for number, reader in enumerate(readers):
        for key, event in reader.events:
            programs.setdefault((number, key), []).append(event)
    names = {(number, key): key or readers[number].path.stem for number, key in programs}
    nodes, sides, said = dict.fromkeys(programs, ""), dict.fromkeys(programs, ""), dict.fromkeys(programs, "")
    serving = []
    for one, own in programs.items():
        arguments = next((event.values for event in own if isinstance(event, Arguments) and event.values), {})
        side = str(arguments.get("disaggregation_mode") or "")
        named = [each for each in ("prefill", "decode") if each in names[one].lower()]
        sides[one] = side if side in ("prefill", "decode") else named[0] if len(named) == 1 else ""
        said[one] = sides[one] or _side_said(own)
        if isinstance(count := arguments.get("nnodes"), int) and count > 1:
            nodes[one] = f"node {arguments.get('node_rank') or 0}"
        if arguments or any(isinstance(event, Progress | Raised) for event in own):
            serving.append(one)
    if len({*said.values()} - {""}) > 1:
        sides = said
    if len({(nodes[one], sides[one]) for one in serving}) < len(serving):
        nodes |= {one: nodes[one] or names[one] for one in serving}
    # A pasted stack may have only a thread's id, and a list of processes beside it the name.
    every = [(one, event) for one, own in programs.items() for event in own]
    stacks_of = [(one[0], event) for one, event in every if isinstance(event, Stack) and event.who]
    listed = {(number, event.sample.pid): event.who for number, event in stacks_of if event.sample.pid}
    for one, event in every:
        place: dict[str, Any] = {"node": nodes[one], "side": sides[one]} if nodes[one] or sides[one] else {}
        # Later output may cut or wrap the text or put it into a link, so secrets are removed here.
        fields = place | {name: redact_text(text) for name in ("text", "said") if (text := getattr(event, name, ""))}
        if isinstance(event, Stack) and not event.who:
            main = next((thread.native_id for thread in event.sample.threads if thread.name == "MainThread"), None)
            fields |= {"who": who} if (who := listed.get((one[0], event.sample.pid or main or 0))) else {}
        if isinstance(event, Raised):
            errors = (msgspec.structs.replace(error, text=redact_text(error.text)) for error in event.chain)
            fields["chain"] = tuple(errors)
        if isinstance(event, Arguments):
            fields["values"] = redact_json(event.values)
        yield msgspec.structs.replace(event, **fields) if fields else event


def _side_said(events: Sequence[Event]) -> str:
    """Return the side of a pair that a program's lines and batches show; empty if they show neither or both."""
    texts = (getattr(event, "text", "") for event in events)
    said = {one for text in texts if (match := _OF_SIDE.match(text)) for one in match.groups() if one}
    return said.pop().lower() if len(said) == 1 else ""
