"""Read a GPU core with NVIDIA's cuda-gdb: its GPUs, kernels with their parameters, and exceptions.

cuda-gdb runs as a separate program with a deadline: a damaged core makes it hang, fail an assertion or die by a signal.
Sources: NVIDIA's CUDA-GDB manual, "GPU core dump support" and "info cuda Commands", and the output of 12.4 and 13.0 for
cores of an H200. 13.0 dies by SIGABRT on a core of an MMU fault, which 12.4 reads.
"""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.cuda_core.trigger import is_whole_core
from sglang_crashkit.capture.debugger import GET_CUDA_GDB, begin_command, find_cuda_gdb, own_environ
from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.errors import CrashkitError

#: The deadline of cuda-gdb. A core of a GPU full of warps takes seconds; with registers and memory it takes longer.
MAX_SECONDS = 60.0
#: The most bytes of output; it has a line for each kernel.
MAX_OUTPUT = 1 << 20
#: Characters of a line to parse, and of a name to keep: templates make names of thousands of characters.
_MAX_LINE, _MAX_NAME = 4096, 200
#: The last command decides on the exit status, so ``devices``, which never fails, comes last.
_TABLES = ("kernels", "devices")
#: The beginning of the line before each table.
_MARK = "== "

#: ``*   0        1b:00.0 NVIDIA H200       GH100   sm_90   132 ...``
_DEVICE = re.compile(r"[* ] +(\d+) +\S+ +(\S.{0,80}?) +\S+ +(sm_\w+) +(\d+) +\d+ +\d+ +\d+ +0x\w+ *$")
#: ``*      0      -   0    7 Active 0x00000001 (2,1,1) (32,1,1) spin_kernel(flag=0x7f)``, with a cluster in some.
_KERNEL = re.compile(
    r"[* ] +\d+ +\S+ +(?P<device>\d+) +(?P<grid_id>\d+) +(?P<status>\w+) +0x\w+ +"
    r"\((?P<grid>[\d,]+)\) +\((?P<block>[\d,]+)\) +(?:\([\d,]+\) +)?(?P<call>\S.*)"
)
_EXCEPTION = re.compile(r"CUDA Exception: (.+)")
_ERROR_PC = re.compile(r"The exception was triggered at PC (0x\w+)")
_FOCUS = re.compile(r"\b(grid|block|device|sm|warp) (\([\d,]+\)|\d+)")
_FRAME = re.compile(r"#0 +(?:(0x\w+) in )?(.+)")
_PARAMETERS = re.compile(r">>> \(([^()]{1,1000})\)")
_REFUSED = re.compile(r"Failed to read core file: (.+)")


class CudaCoreError(CrashkitError):
    """cuda-gdb is not installed, or the file is not a complete core, or cuda-gdb cannot read it."""


@dataclass(frozen=True)
class Device:
    """A GPU that the process saw."""

    number: int  # its device number in this process
    name: str
    sm_type: str  # its instruction set, such as ``sm_90``
    sms: int  # how many SMs it has


@dataclass(frozen=True)
class Kernel:
    """A kernel that was on a GPU."""

    device: int  # see `Device.number`
    grid_id: int  # unique among the launches of the process
    status: str  # ``active`` and the like
    grid: str  # how many blocks it has, such as ``2x1x1``
    block: str  # how many threads each block has
    call: str  # its name, and its parameters if cuda-gdb knows them


@dataclass(frozen=True)
class Focus:
    """The thread that cuda-gdb selects at first: the first that failed, else the first of all."""

    exception: str  # the exception in cuda-gdb's words; empty without an exception
    pc: str  # the hexadecimal address that triggered it, or else the thread's program counter; empty if unknown
    function: str  # the function at `pc`, with its parameters if they are known; empty if unknown
    places: dict[str, str]  # ``device``, ``sm``, ``warp``, ``grid`` and ``block``, as cuda-gdb writes them


@dataclass(frozen=True)
class CudaCore:
    """The contents of a core, as cuda-gdb prints them."""

    devices: tuple[Device, ...]
    kernels: tuple[Kernel, ...]
    focus: Focus | None  # None if no thread was on a GPU
    problem: str  # why this is incomplete; empty if it is complete
    text: str  # the output of cuda-gdb

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without the text."""
        return {name: value for name, value in asdict(self).items() if name != "text"}


def read_cuda_core(path: Path, seconds: float = MAX_SECONDS, folder: Path | None = None) -> CudaCore:
    """Read a core with cuda-gdb.

    Args:
        path: the core, not a link to one.
        seconds: the time after which cuda-gdb is killed; its output up to then is used.
        folder: the folder in which cuda-gdb gets a folder for its own files; by default the temporary folder.

    Raises:
        CudaCoreError: see there; the message has the reason.
    """
    program = find_cuda_gdb()
    if program is None:
        raise CudaCoreError(f"cuda-gdb, which reads {path}, is not installed", next_step=GET_CUDA_GDB)
    if not is_whole_core(path):
        what = "is no whole GPU core" if path.exists() else "does not exist"
        raise CudaCoreError(f"{path} {what}", next_step="name the file that CUDA_COREDUMP_FILE made")
    try:
        with tempfile.TemporaryDirectory(prefix="cuda-gdb-", dir=folder, ignore_cleanup_errors=True) as own:
            # Link to the core by a fixed name, so that its own name cannot become part of a command.
            link = Path(own) / "core"
            link.symlink_to(path.absolute())
            argv = [*begin_command(program), "-ex", f"target cudacore {link}"]
            for name in _TABLES:
                argv += ["-ex", f"echo {_MARK}{name}\\n", "-ex", f"info cuda {name}"]
            run = run_tool(argv, seconds, environ=own_environ() | {"TMPDIR": own}, max_output=MAX_OUTPUT)
    except OSError as error:
        raise CudaCoreError(f"cuda-gdb gets no folder of its own: {error}") from error
    core = parse(run.text, run.reason)
    if not core.devices:
        refused = _REFUSED.search(run.text)
        reason = run.reason or (refused[1][:_MAX_NAME] if refused else "it lists no GPU")
        if run.status is not None and run.status < 0:
            reason = f"it died by {signal.Signals(-run.status).name}, as on a damaged core"
        raise CudaCoreError(
            f"{path} cannot be read by cuda-gdb: {reason}",
            next_step="take a cuda-gdb as new as the driver, or another version: 13.0 dies on cores that 12.4 reads",
        )
    return core


def parse(text: str, problem: str = "") -> CudaCore:
    """Parse the output of cuda-gdb; `problem` is why it is incomplete."""
    # A name in a hostile core must not move the cursor of a terminal.
    text = "".join(one if one.isprintable() or one == "\n" else "?" for one in text)
    opening, *parts = text.split(f"\n{_MARK}")
    tables: dict[str, list[str]] = {}
    for part in parts:
        tables.setdefault(part.partition("\n")[0], []).extend(part.split("\n")[1:])
    devices = tuple(
        Device(int(row[1]), row[2][:_MAX_NAME], row[3], int(row[4])) for row in _rows(tables, "devices", _DEVICE)
    )
    kernels = tuple(
        Kernel(
            int(row["device"]),
            int(row["grid_id"]),
            row["status"].lower(),
            row["grid"].replace(",", "x"),
            row["block"].replace(",", "x"),
            row["call"].strip()[:_MAX_NAME],
        )
        for row in _rows(tables, "kernels", _KERNEL)
    )
    return CudaCore(devices, kernels, _focus_of(opening), problem, text)


def _rows(tables: dict[str, list[str]], name: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    matches = (pattern.match(line[:_MAX_LINE]) for line in tables.get(name, ()))
    return (match for match in matches if match)


def _focus_of(opening: str) -> Focus | None:
    found: dict[str, re.Match[str]] = {}
    places: dict[str, str] = {}
    for line in opening.splitlines():
        for name, pattern in (("exception", _EXCEPTION), ("pc", _ERROR_PC), ("frame", _FRAME)):
            if match := pattern.match(line[:_MAX_LINE]):
                found.setdefault(name, match)
        if line.startswith("[Current focus set to CUDA kernel"):
            places = dict(_FOCUS.findall(line[:_MAX_LINE]))
    if not places and "exception" not in found:
        return None
    frame = found.get("frame")
    pc = found["pc"][1] if "pc" in found else (frame[1] or "") if frame else ""
    function, _, launch = (frame[2] if frame else "").partition("<<<")
    function = function.strip()[:_MAX_NAME]
    if "(" not in function and (parameters := _PARAMETERS.search(launch[:_MAX_LINE])):
        # cuda-gdb 12.4 prints the parameters only after the launch.
        function = f"{function}({parameters[1]})"[:_MAX_NAME]
    function = "" if function == "??" else function
    return Focus(found["exception"][1][:_MAX_NAME] if "exception" in found else "", pc, function, places)


def core_in_lines(core: CudaCore, most: int = 32) -> Iterator[str]:
    """Yield a line for each kernel of a core, up to `most`, then for its exception, which begins ``exception: ``."""
    for kernel in core.kernels[:most]:
        shape = f"grid {kernel.grid}, block {kernel.block}, {kernel.status}, grid id {kernel.grid_id}"
        yield f"kernel {kernel.call} on GPU {kernel.device}: {shape}"
    if len(core.kernels) > most:
        yield f"{len(core.kernels) - most} more kernels"
    if not core.kernels:
        yield "no kernel on the GPU"
    if core.focus is not None:
        where = ", ".join(f"{name} {place}" for name, place in core.focus.places.items())
        lead = f"exception: {core.focus.exception}" if core.focus.exception else "a thread"
        place = f" at {core.focus.pc}" if core.focus.pc else ""
        function = f" in {core.focus.function}" if core.focus.function else ""
        yield f"{lead}{place}{function}{f' ({where})' if where else ''}"
    if core.problem:
        yield f"that is not all: {core.problem}"
