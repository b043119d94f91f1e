"""Facts that a single log line states: its level, a stage, an exit, arguments, a release."""

from __future__ import annotations

import ast
import re
import signal
from typing import Any

from sglang_crashkit.model.event import LineLevel

#: Patterns of the levels; the first row that matches counts. A level may have several rows.
_LEVELS: tuple[tuple[LineLevel, re.Pattern[str]], ...] = (
    ("critical", re.compile(r"\bCRITICAL\b|\bFATAL\b|terminate called|what\(\):|panicked at|Check failed:|Aborted \(")),
    ("critical", re.compile(r"Fatal Python error|\bF\d{4}(?:\d{4})? \d\d:|killed by the OOM killer|core dumped")),
    ("critical", re.compile(r"Memory access fault by GPU|Starting GPU coredump|\bcoredump: |hit an exception")),
    ("critical", re.compile(r"\[PG ID \d.{0,200}(?:timeout|exception)")),
    ("error", re.compile(r"^-- (?:Reboot|Boot [0-9a-f]{8,40}) --$|\bERROR\b|^ERR\b")),
    ("error", re.compile(r'"[A-Z]{3,7} https?://\S{1,300} HTTP/[\d.]{1,3}" [45]\d\d\b')),
    ("error", re.compile(r"^(?:\[rank\d{1,5}\]:\[)?E\d{3,4}(?:\d{4})? \d\d:|(?i:error|exception)[:( ]")),
    ("error", re.compile(r"(?i)\b(?:error|out of bounds?|exception|fatal|aborted?|crash(?:ed)?)\b")),
    (
        "error",
        re.compile(
            r"(?i)\b(?:failed|failure|refused|cannot|can't|could not|unable to|denied|timed? ?out|timeout|killed|lost"
            r"|out of memory|no space left|sigquit|sigterm|sigkill|unexpectedly|not enough|leak|died|is dead"
            r"|unsupported|not ready yet|invalid|HSA_STATUS_ERROR_\w+|not supported|profiled value -\d+"
            r"|unbound variable|command not found|mismatch(?:ed)?|corruption|unhealthy|stuck|divergence|defunct"
            r"|system boot)\b"
        ),
    ),
    ("warning", re.compile(r"\bWARN(?:ING)?\b|^W\d{4}(?:\d{4})? \d\d:|Warning:")),
    ("warning", re.compile(r"(?i)\b(?:warning|deprecated|retry(?:ing)?|slow)\b")),
)
#: The beginning of a person's sentence: a failure that it mentions is not an event of this log.
_PROSE = re.compile(r"(?:I|We|My|Our|Still) [a-z]")
_STATED = re.compile(r"(?:.{0,60}?[\s|\[(-])?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)(?=[:\s\]|)-])")
_BY_WORD: dict[str, LineLevel] = {"DEBUG": "debug", "INFO": "info", "WARN": "warning", "WARNING": "warning"}

#: An answer in a server's log, or one that a router passed on. A router's line about a failure counts by its words.
ACCESS = re.compile(
    r'(?:"|method=)(GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) (?:uri=|path=)?(\S{1,300}) '
    r'(?:HTTP/[\d.]+" |.{0,300}?\b(?P<passed>status(?:_code)?=)(?=2))(?P<status>\d{3})\b'
)


_Rows = tuple[tuple[str, bool, re.Pattern[str]], ...]


def _compiled(*rows: tuple[str, bool, str]) -> _Rows:
    return tuple((name, is_done, re.compile(pattern)) for name, is_done, pattern in rows)


_GRAPHS = r"Capture (?:\w{1,30} ){0,4}(?:cuda |piecewise )?graph "
STAGES = _compiled(
    ("ready", True, r"(?<!['\"])(?:fired up and )?ready to roll\b(?!')|\b(?:healthy|ready) after \d+ ?s"),
    ("ready", True, r"Serving Benchmark Result"),
    ("distributed", False, r"Init torch distributed begin|initializing distributed|rendezvous"),
    ("distributed", True, r"Init torch distributed ends?\b"),
    ("weights", True, r"Load(?:ing)? weights? (?:end|ends|finished|took)|Loading .{0,40}shards: +100%"),
    ("weights", False, r"Load(?:ing)? weights? begin|Loading required modules|Loading .{0,60}shards:"),
    ("weights", False, r"Loading weights|load_model"),
    ("kv_cache", True, r"KV Cache is allocated|max_total_num_tokens=|Memory pool end"),
    ("graphs", True, _GRAPHS + r"(?:end|ends)"),
    ("graphs", False, _GRAPHS + r"begin|Capturing (?:batches|num tokens)"),
    ("compile", False, r"(?i)\b(?:jit|pre-?)?-?compil(?:e|ing|ation)\b(?! tools)|DeepGEMM warm|ninja"),
    ("compile", False, r"(?i)nvcc(?!: Cuda)|autotun|tuning"),
    ("warmup", False, r"(?i)\bwarm-?(?:ing )?up\b"),
    ("router", False, r"Starting router|Router starting"),
    ("http", True, r"Application startup complete|Uvicorn running on"),
)
STOPS = _compiled(
    ("signal", True, r"Finished server process|SIGTERM.{0,60}(?:exit|finished)|All requests (?:are )?drained"),
    ("signal", True, r"Gracefully exiting\.{3} Remaining number of requests 0\b"),
    ("signal", False, r"(?:received|got|caught|handling) (?:signal )?(?:SIGTERM|SIGINT|15\b)|SIG(?:TERM|INT) received"),
    ("signal", False, r"Gracefully exiting|Received sigterm|Signal SIGTERM received|signal_handler"),
    ("signal", False, r"\bKeyboardInterrupt\b|\^C$|Shutting down$"),
    ("systemd", False, r"^Stopping |State 'stop-sigterm'|Scheduled restart job"),
    ("systemd", True, r"^Stopped |Deactivated successfully|: Succeeded\."),
    ("kubernetes", False, r"Stopping container|\bPreempt(?:ed|ing)\b|\bEvicted\b(?! \d)|ScalingReplicaSet"),
    ("kubernetes", False, r"Scaled down|DeletionTimestamp"),
    ("slurm", False, r"CANCELLED AT|DUE TO (?:TIME LIMIT|PREEMPTION)|Job step aborted|forcing job termination"),
    ("docker", False, r"docker (?:stop|compose down)|Container \S+ (?:Stopping|Stopped)"),
    ("a person", False, r"killall_sglang|^(?:\S{0,80}[$#] ?|\+ )(?:sudo )?(?:pkill|killall|kill (?:-\w+ )*\d)"),
)
#: A systemd unit that is not a server: of the driver, the container engine, a scheduler.
OTHER_UNIT = re.compile(
    r"\A(?:nvidia-(?:fabricmanager|persistenced|dcgm|imex)|nv-hostengine|dcgm\w{0,40}|docker|containerd"
    r"|cri-o|kubelet|slurm\w{1,5}|munge|systemd-\w{1,40}|sshd?|NetworkManager|snapd|cron)\.(?:service|socket)\b"
)
_CODE = re.compile(
    r"(?:[Ee]xit(?:ed)?(?: with)?(?: with)?(?: the)?[ _-]?(?:code|Code|status)?|exitcode|return(?:ed)? code|returncode)"
    r"[:= ]{1,3}(?P<code>-?\d{1,3})\b"
    r"|code=(?:killed|dumped|exited), status=(?P<status>\d{1,3})(?:/(?P<name>[A-Z]+))?"
    r"|Exited \((?P<docker>\d{1,3})\)"
    r"|: line \d+: +\d+ (?P<shell>Killed|Aborted|Bus error|Segmentation fault)\b"
    r"|(?P<killed>\bKilled\b)$|(?P<aborted>\bAborted\b)(?: +\(core dumped\))?$"
    r"|(?P<bus>\bBus error\b)(?: \(core dumped\))?"
    r"|Caught signal \d{1,2} \((?P<caught>Segmentation fault|Bus error|Aborted)\b"
    r"|(?P<segv>\bSegmentation fault\b)(?: \(core dumped\))?$|died (?:by|of|from|with) (?P<signal>SIG[A-Z]+)"
    r"|(?:killed|terminated) by (?:signal )?(?P<by>SIG[A-Z]+|\d{1,2}\b)"
)
_SIGNALS = {"Killed": "SIGKILL", "Aborted": "SIGABRT", "Bus error": "SIGBUS", "Segmentation fault": "SIGSEGV"}
_SUBJECT = re.compile(
    r"(?i)scheduler_(?P<number>\d+)\b|scheduler_?(?P<ranks>(?:[_ ]?(?:DP|TP|PP|EP)_?\d+)*)"
    r"|rank[ _=:]?(?P<rank>\d+)|(?P<detokenizer>detokenizer)|task (?P<task>\d+)"
)
_ARGUMENT = re.compile(r"(?:^|, )([a-z_]\w{1,60})=")
_RELEASE = re.compile(
    r"(?i)\bsglang(?:_router)?(?:[ :=v-]{1,4}| version[:= ]+v?|/sglang:v?)(0\.\d{1,2}\.\d{1,2}(?:\.?(?:post|rc)\d+)?)"
)
_OPTION = re.compile(r"--([a-z][a-z0-9-]{1,60})(?:[= ]([^\s-]\S*|-\d\S*))?")
#: The arguments' names of options with several names.
_ALIASES = {
    "tp": "tp_size", "tensor_parallel_size": "tp_size", "dp": "dp_size", "data_parallel_size": "dp_size",
    "pp": "pp_size", "pipeline_parallel_size": "pp_size", "ep": "ep_size", "expert_parallel_size": "ep_size",
    "model": "model_path", "speculative_algo": "speculative_algorithm",
}  # fmt: skip
_MAX_ARGUMENTS = 20_000


def level_of(text: str) -> LineLevel:
    """Return the level of a line: the level that it states, else one by the words in it."""
    if _PROSE.match(text):
        return "info"
    # A router logs at level INFO that its workers are not ready, so here the words count.
    is_by_words = "NCCL WARN" in text or "not ready yet" in text
    if not is_by_words and (stated := _STATED.match(text)) and stated[1] in _BY_WORD:
        return _BY_WORD[stated[1]]
    text = text[:1500]
    return next((level for level, pattern in _LEVELS if pattern.search(text)), "info")


def is_complaint(text: str) -> bool:
    """Return whether a line states a level above INFO, whatever words are in it."""
    stated = _STATED.match(text)
    return stated is not None and stated[1] not in ("DEBUG", "INFO")


def row_of(rows: _Rows, text: str) -> tuple[str, bool] | None:
    """Return the name of the row of `STAGES` or `STOPS` (who stopped the server) that a line matches, and `is_done`."""
    return next(((name, is_done) for name, is_done, pattern in rows if pattern.search(text)), None)


def exit_of(text: str) -> tuple[int | None, str] | None:
    """Return the exit status and the signal with which a process ended, by a line; None if the line has neither."""
    match = _CODE.search(text[:1000])
    if match is None:
        return None
    if found := next((_SIGNALS[one] for one in match.groups() if one in _SIGNALS), ""):
        return None, found
    if named := match["signal"] or match["by"]:
        return (None, named) if named.startswith("SIG") else (None, signal_name(int(named)))
    if match["name"] and match["name"] != "FAILURE":
        return None, f"SIG{match['name']}" if match["status"] != "0" else ""
    code = int(match["code"] or match["status"] or match["docker"] or 0)
    if code > 0 and code & 0x7F != 0x7F and "unexpectedly failed with" in text:
        # SGLang's handler of SIGCHLD prints the status in the form of waitpid(2).
        return (None, signal_name(code & 0x7F)) if code & 0x7F else (code >> 8, "")
    return code, signal_name(-code if code < 0 else code - 128 if code > 128 else 0)


def signal_name(number: int) -> str:
    """Return the name of a signal; empty for a number without a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def subject_of(text: str) -> str:
    """Return the short name of the process that a line of another process is about; empty if it names no process."""
    match = _SUBJECT.search(text[:600])
    if match is None:
        # A container exits with its first process, but a status above 128 may be from the signal of a child.
        return "main process" if re.search(r"Exited \((?:\d{1,2}|1[01]\d|12[0-8])\)", text[:600]) else ""
    if match["detokenizer"]:
        return "detokenizer"
    if number := match["rank"] or match["number"]:
        return f"TP{number}"
    if match["task"]:
        return ""
    ranks = re.findall(r"(DP|TP|PP|EP)_?(\d+)", match["ranks"] or "")
    return " ".join(f"{name}{number}" for name, number in ranks) or "scheduler"


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments in a line with ``server_args=ServerArgs(…)`` or a command line of a server, or None."""
    place, found = text.find("ServerArgs("), dict[str, Any]()
    if place >= 0:
        fields = text[place + len("ServerArgs(") :][:_MAX_ARGUMENTS]
        starts = list(_ARGUMENT.finditer(fields))
        for match, following in zip(starts, [*starts[1:], None], strict=False):
            value = fields[match.end() : following.start() if following else len(fields)]
            found[match[1]] = _value(value if following else value.rstrip().removesuffix(")"))
        return found
    if "sglang.launch_server" in text or "sglang serve" in text:
        for name, value in _OPTION.findall(text[:_MAX_ARGUMENTS]):
            name = name.replace("-", "_")
            found[_ALIASES.get(name, name)] = _value(value) if value else True
        return found
    return None


def release_of(text: str) -> str:
    """Return SGLang's release in a line; empty if the line has no release."""
    match = _RELEASE.search(text[:600])
    return match[1] if match else ""


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text[:200]
