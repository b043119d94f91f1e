"""The rules: from an incident to the class of its cause, with what speaks for it.

`RULES` is the one table, most telling first: the first rule that finds something gives the class. So what the kernel or
the driver says stands before what a process says of itself, and that before what is only likely.

A rule about an exception is *established* where something beside the words tells: an exception class of its own
(``torch.OutOfMemoryError``) or the frames that it came through. By its words alone it is *supported* at most, since
anybody can raise an exception with the same words. So is a class that says no more than that there was an exception:
what brought it about may have a class of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from itertools import takewhile
from signal import Signals
from typing import Any

from sglang_crashkit.analysis.causes import no_progress
from sglang_crashkit.analysis.causes.advice import COMPILER_FAILED, NO_COMPILER, hint_of
from sglang_crashkit.analysis.causes.case import Case, Finding, Raised, name_of
from sglang_crashkit.analysis.suspects import ABORTED, ALONE, ALONE_AT, ONLY
from sglang_crashkit.judge.matching import are_in
from sglang_crashkit.model.checked_json import mapping_of, mappings_of
from sglang_crashkit.model.incident import Level

#: What is established of a process that died, by the signal.
_BY_SIGNAL = {"SIGSEGV": "segfault", "SIGABRT": "aborted", "SIGBUS": "bus_error", "SIGKILL": "killed"}
_ORDERLY = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
#: What a shell, or a program that stands for another one, ends with where that one died of a signal.
_OF_A_CHILD = {128 + signal: signal.name for signal in Signals}
#: Xid errors that speak of the GPU or its links, and those that a program's own fault gives; from NVIDIA's "XID
#: Errors". 45 is what follows upon others.
_XIDS_OF_HARDWARE = frozenset({46, 48, 62, 64, 74, 79, 94, 95, 110, 119, 120, 140, *range(144, 151)})
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43})
#: Exception classes that Python code raises for anything.
_ANY_CLASS = re.compile(
    r"\b((Assertion|Attribute|FileNotFound|Import|Memory|ModuleNotFound|OS|Permission|Runtime|Type|Value)Error"
    r"|Exception)\b"
)
#: A file system this full, from 0 to 1, has no room for what is needed.
_FULL = 0.95
_MAX_NAMED = 3
_TIMED_OUT = (
    r"(\[[^\]]*gloo[^\]]*\] )?(Timed out waiting \d+ ?ms for (recv|send) operation"
    r"|Application timeout caused pair closure)"
    r"|(\[[^\]'\"]{0,80}\] )?Watchdog caught collective operation timeout|DeepEP error: .{0,40}timeout"
)
#: What a scheduler goes through with one request, and no batch.
_TAKING_IN = ("*handle_generate_request (*.py)", "*handle_embedding_request (*.py)", "*handle_tokenized_* (*.py)")
#: Upon that the HTTP server ends with a status, and without an exception.
_NO_BIND = re.compile(r"\S+ ERROR uvicorn\.error: \[Errno 98\] ")
#: Another word than that of a failed capture of CUDA graphs, which lists this option among what may help.
_TOO_LITTLE = (
    r"Not enough memory\. Please try|The memory capacity is unbalanced"
    r"|[\s\S]{0,600}\b(increase|[Rr]aise|lower) --mem-fraction-static"
)
_NO_SPACE = r"\[Errno 28\] No space left on device"
#: As what is written in Rust has it, such as the downloads from a hub.
_NO_SPACE_IN_RUST = r"[^'\"\n]{0,200}No space left on device \(os error 28\)"
#: NCCL's, which does not say why where it is old.
_NO_SEGMENT = r"[\s\S]{0,2000}Error while creating shared memory segment /dev/shm(?![\s\S]*Permission denied)"
#: Those of torch.
_NO_FILE_IN_SHM = r"unable to (write to|allocate shared memory\(shm\) for) file </torch_\S+: No space left on device"
_OF_PAIRS = re.compile(r"sglang/srt/disaggregation/")


Rule = Callable[[Case], Finding | None]


def raises(
    kind: str, text: str = "", *through: str, path: str = "", starting: bool | None = None, establishes: bool = True
) -> Rule:
    """Return the rule that the exception of the first failure is of one kind.

    Args:
        kind: pattern of its whole type, with or without its module.
        text: pattern that its text begins with.
        through: patterns (of `fnmatch`) of places, each of which it came through.
        path: pattern of a file that it came through.
        starting: whether the server was starting; None where that does not matter.
        establishes: whether more than the words may tell of it.
    """
    types, words, files = re.compile(rf"(?:\w+\.)*(?:{kind})"), re.compile(text), re.compile(path)
    is_telling = establishes and (bool(through or path) or not _ANY_CLASS.search(kind))

    def rule(case: Case) -> Finding | None:
        error = case.error
        if error is None or (starting is not None and case.is_starting is not starting):
            return None
        if not (types.fullmatch(error.type) and words.match(error.text) and are_in(through, error.places)):
            return None
        if path and not any(files.search(one) for one in error.paths):
            return None
        return Finding("established" if is_telling else "supported", (_sentence(case, error),))

    return rule


def _sentence(case: Case, error: Raised) -> str:
    where = f" in {error.places[0]}" if error.places else ""
    line = error.text.strip().split("\n", 1)[0][:200]
    return f"{name_of(case.first) if case.first else 'A process'} raised {error.type}{where}: {line}"


# -- what the kernel and the driver say


def _host_oom(case: Case) -> Finding | None:
    detail = str(case.end.get("detail"))
    if case.verdict.get("kind") == "oom_kill":
        return Finding("established", (f"The kernel killed {name_of(case.first)} for lack of memory: {detail}.",))
    for process in case.processes:
        end = process.get("exit")
        if isinstance(end, dict) and end.get("cause") == "oom_kill":
            reason = f"The kernel killed {name_of(process)} for lack of memory, though it was not seen to fail first."
            return Finding("supported", (reason,))
    return None


#: What no broken GPU brings about: that is a RuntimeError, or another one of torch's.
_OF_NO_GPU = re.compile(
    r"(\w+\.)*(Attribute|Assertion|FileNotFound|Import|Index|Key|Memory|ModuleNotFound|Name|NotImplemented|OS"
    r"|OutOfMemory|Overflow|Type|UnboundLocal|Value|ZeroDivision|ZMQ)Error"
)
_TELLS_OF_GPU = re.compile(r"[^'\"\n]{0,100}\b(CUDA|HIP|NCCL|CUBLAS)")


#: What seldom uses a GPU, though a tokenizer may for images.
_WITHOUT_GPU = frozenset({"detokenizer", "tokenizer_worker", "tokenizer"})


def _hardware(case: Case) -> Finding | None:
    found = [event for event in case.xids if event["xid"] in _XIDS_OF_HARDWARE and not _is_of_others(case, event)]
    if not found or case.signal == "SIGKILL" or case.end.get("signal") in _ORDERLY:
        return None
    holders = [one for event in found for one in mappings_of(event.get("processes"))]
    pid = case.first.get("pid")
    error = case.error
    if error is not None and _OF_NO_GPU.fullmatch(error.type):
        return None
    if case.first.get("role") in _WITHOUT_GPU and pid not in [one.get("pid") for one in holders]:
        return None
    own = (error is None or _TELLS_OF_GPU.match(error.text)) and any(
        one.get("pid") == pid and one.get("level") == "established" for one in holders
    )
    reasons = (f"The driver reported Xid {event['xid']} of GPU {event.get('bus_id')}." for event in found[:_MAX_NAMED])
    return Finding("established" if own else "supported", tuple(reasons))


def _is_of_others(case: Case, event: Mapping[str, Any]) -> bool:
    """Say whether an Xid error is of a GPU that other programs have, and each rank of this server is known on another.

    A GPU that fell off the bus lists nobody.
    """
    devices = mappings_of(mapping_of(case.document.get("gpus")).get("devices"))
    placed = {one.get("pid") for device in devices for one in mappings_of(device.get("processes"))}
    its = next((device for device in devices if device.get("bus_id") == event.get("bus_id")), {})
    return (
        bool(its.get("others"))
        and not its.get("processes")
        and placed.issuperset(rank.get("pid") for rank in case.schedulers)
    )


def _gpu_said(case: Case) -> Finding | None:
    lines = [line for line in case.first.get("gpu") or () if str(line).startswith("exception: ")]
    if lines:
        return Finding("established", (f"The GPU core of {name_of(case.first)} says: {lines[0]}.",))
    programs = [event["xid"] for event in case.xids if event["xid"] in _XIDS_OF_PROGRAMS]
    if programs and case.signal == "SIGABRT":
        return Finding("supported", (f"The driver reported Xid {programs[0]}, and {name_of(case.first)} aborted.",))
    return None


def _no_space_by_signal(case: Case) -> Finding | None:
    memory = mapping_of(mapping_of(case.document.get("environment")).get("shared_memory"))
    used, total = memory.get("used_bytes"), memory.get("total_bytes")
    use = used / total if isinstance(used, int) and isinstance(total, int) and total > 0 else 0.0
    signal = case.end.get("signal") if case.is_starting else case.signal
    if signal != "SIGBUS" or use < _FULL:
        return None
    return Finding("supported", (f"{name_of(case.first)} died of SIGBUS while /dev/shm was {use:.0%} full.",))


def _asked_to_stop(case: Case) -> Finding | None:
    signal = str(case.end.get("signal") or "")
    if signal in _ORDERLY and not case.is_hang:
        return Finding("established", (f"{name_of(case.first)} was ended by {signal}, which asks for an orderly end.",))
    if not case.first and not case.is_hang and case.has_event("draining"):
        return Finding("supported", ("The server was asked to end, and no process was seen to fail.",))
    return None


def died_of(*signals: str) -> Rule:
    """Return the rule that the first failure died of one of these signals; of any where none is named."""

    def rule(case: Case) -> Finding | None:
        signal = case.signal
        if not signal or signal in _ORDERLY or (signals and signal not in signals):
            return None
        detail = str(case.end.get("detail"))
        # Without a count it may as well have been the kernel, for lack of memory.
        is_known = signal != "SIGKILL" or "counts no OOM kill" in detail
        return Finding(
            "established" if is_known else "supported", (f"{name_of(case.first)} died of {signal}: {detail}.",)
        )

    return rule


# -- pairs and nodes


def _peer(case: Case) -> Finding | None:
    level: Level = "established" if case.verdict.get("level") == "established" else "supported"
    return Finding(level, (case.statement,)) if case.verdict.get("kind") == "peer_lost" else None


def _transfer(case: Case) -> Finding | None:
    signs = [one.get("sign") for one in mappings_of(case.document.get("peers"))]
    if case.verdict.get("kind") != "peer_lost" or not signs or any(sign != "failed_transfer" for sign in signs):
        return None
    return Finding("supported", (str(case.verdict.get("text")),))


def _connection(case: Case) -> Finding | None:
    # Of a server on one host that starts, all ranks are known: it is their setting up of NCCL or gloo that fails.
    if case.verdict.get("kind") != "lost_peer" or (case.is_starting and not case.has_other_nodes):
        return None
    return Finding("supported", (case.statement,))


# -- processes by their role, and what is left


def _lost(*roles: str) -> Rule:
    def rule(case: Case) -> Finding | None:
        if case.first.get("role") not in roles or case.is_hang:
            return None
        if case.error is not None:
            return Finding("established", (_sentence(case, case.error),))
        if not case.end or case.end.get("cause") in ("unknown", "parent_ended"):
            return None
        how = case.end.get("signal") or f"exit status {case.end.get('code')}"
        return Finding("established", (f"{name_of(case.first)} ended by {how}: {case.end.get('detail')}.",))

    return rule


def _poison(case: Case) -> Finding | None:
    error = case.error
    if error is None or case.is_starting:
        return None
    by_issue = next((issue for issue in case.known if issue.by_request), None)
    if by_issue is not None:
        reason = f"Upstream's issue {by_issue.issue} tells of one request that ends a server so: {by_issue.title}."
    elif case.repeated:
        reason = f"A request like {case.repeated} was suspected in an earlier incident of the same fault."
    elif (
        any(are_in([place], error.places) for place in _TAKING_IN)
        and not _is_of_host(error)
        and not any(map(_OF_PAIRS.search, _within(error, _TAKING_IN)))
    ):
        # What fails for want of the other server of a pair, would with any request.
        reason = "It came while one request was taken in."
    else:
        return None
    which = case.suspected or case.repeated
    suspected = (f"Request {which} is suspected most.",) if which and which not in reason else ()
    return Finding("supported", (_sentence(case, error), reason, *suspected), (_block(which),))


#: What the kernel refuses has to do with the host; that a file is not there may have to do with a request.
_OF_HOST = re.compile(r"\[Errno (?!2\])\d+\]")


def _is_of_host(error: Raised) -> bool:
    return bool(hint_of(error.text) or _OF_HOST.match(error.text))


def _within(error: Raised, places: tuple[str, ...]) -> list[str]:
    """Return the files of the frames that an exception came through before it came to one of `places`."""
    frames = zip(error.places, error.paths, strict=False)
    inner = takewhile(lambda frame: not any(fnmatchcase(frame[0], place) for place in places), frames)
    return [path for _place, path in inner]


#: What is said of any request that a server fails with whose only one it is.
_BY_PLACE = frozenset({ABORTED, ALONE, ALONE_AT})
#: Where a scheduler is at a request that was in no step yet.
_BEGINNING = (*_TAKING_IN, "*get_new_batch_prefill* (*.py)", "*prepare_for_extend (*.py)")


def _block(rid: str) -> str:
    what, by = (f"request {rid}", "") if rid else ("it", " by the ids that the rank names")
    return f"find {what} in requests/requests.jsonl{by}, and block its like at the gateway"


def _suspected(case: Case) -> Finding | None:
    """An exception or a hang that more speaks for one request in than that no other one was there.

    A signal is a cause of its own: whoever sent it, or what the process had done to its memory, may have nothing to do
    with the request that was in the step.
    """
    which = case.suspected
    if not which or case.is_starting or (case.error is None and not case.is_hang):
        return None
    if case.error is not None and _is_of_host(case.error):
        return None
    by_place = _BY_PLACE
    if case.error is not None and not any(are_in([place], case.error.places) for place in _BEGINNING):
        # It may not even have been received.
        by_place |= {ONLY}
    if not case.is_beside_others and by_place.issuperset(case.suspicions):
        return None
    what = _sentence(case, case.error) if case.error is not None else str(case.verdict.get("text"))
    why = "; ".join(case.suspicions)
    return Finding("supported", (what, f"Request {which} is suspected most: {why}."), (_block(which),))


def _port_logged(case: Case) -> Finding | None:
    line = next((line.strip()[:200] for line in case.last_log_lines if _NO_BIND.match(line)), None)
    return Finding("supported", (f"{name_of(case.first)} logged before it ended: {line}",)) if line else None


def _model_load(case: Case) -> Finding | None:
    # What a loader or a configuration refuses is the model as it was asked for: its weights, type or quantization.
    error = case.error
    if error is None or error.type in ("KeyboardInterrupt", "SystemExit"):
        return None
    # What the host or a library refuses meanwhile is something else.
    return None if hint_of(error.text) or _OF_LIBRARIES.match(error.text) else _WHILE_LOADING(case)


def _startup_timeout(case: Case) -> Finding | None:
    for event in case.events:
        if event.get("event") == "startup_timeout":
            return Finding("established", (str(event.get("message") or "The ranks did not get ready in time."),))
    return None


def _startup_failed(case: Case) -> Finding | None:
    if not case.is_starting:
        return None
    if case.error is not None:
        return Finding("supported", (_sentence(case, case.error),))
    if case.end.get("cause") == "exit_status":
        reason = f"{name_of(case.first)} ended by exit status {case.end.get('code')} before the server was ready."
        return Finding("established", (reason,))
    return None


def _exception(case: Case) -> Finding | None:
    if case.error is None or case.verdict.get("kind") not in ("exception", "unknown"):
        return None
    return Finding("supported", (_sentence(case, case.error),))


def _exception_in_sglang(case: Case) -> Finding | None:
    # The innermost frames may be a library's that SGLang called.
    is_own = case.error is not None and any("sglang/" in path for path in case.error.paths[:6])
    return _exception(case) if is_own else None


def _exited(case: Case) -> Finding | None:
    if case.verdict.get("kind") != "exit_status":
        return None
    code = case.end.get("code")
    said = f"{name_of(case.first)} ended with exit status {code} by itself."
    if code in _OF_A_CHILD:
        return Finding("supported", (said, f"A shell ends so whose child died of {_OF_A_CHILD[code]}."))
    return Finding("established" if case.verdict.get("level") == "established" else "supported", (said,))


_WHILE_LOADING = raises(
    r"\w+",
    path=r"sglang/srt/(model_loader|configs)/|transformers/|(huggingface|modelscope)\w*/",
    starting=True,
    establishes=False,
)
#: As what a GPU's libraries report its errors; the last is FlashInfer's.
_GPU_ERRORS = "Exception|RuntimeError|InternalError"
_FROM_GPU = rf"torch\.AcceleratorError|{_GPU_ERRORS}"
_OOM_CLASS = r"torch\.(cuda\.)?OutOfMemoryError"
#: What may stand before what the GPU's driver says: that graphs were captured, and where SGLang's own kernels asked it.
_BEFORE = r"(Capture [\w -]{1,40} graph failed: )?((Runtime check failed|Failed) at \S{1,300}: )?"
#: How torch, Triton and SGLang begin what it says.
_OF_GPU = rf"{_BEFORE}((CUDA|HIP|XPU)( driver)? error:|Triton Error \[(CUDA|HIP)\]:)"
#: What the driver says, or a check in a library's own code such as DeepEP's.
_OF_LIBRARIES = re.compile(rf"{_OF_GPU}|{_BEFORE}(Failed: )?Assertion error \(?\S+\.(cu|cuh|cpp|hpp)\b")
#: How DeepGEMM does, which gives the error's name.
_BY_NAME = (
    rf"{_BEFORE}(CUDA driver error \(\S+\): \d+ \("
    r"|Panic error \(\S+\): [^\n]{1,300}? failed with CUDA error \d+ \()(CUDA_ERROR_|cudaError)"
)
#: How DeepEP does.
_IN_QUOTES = rf"{_BEFORE}Failed: CUDA error \S+ '"
#: A sentence of its own, as they write it.
_OOM_WORDS = (
    rf"({_BEFORE}(CUDA|HIP|XPU|NPU)|{_OF_GPU}) out of memory(\.?(\s*$|\n)|\. )"
    rf"|{_OF_GPU} CUBLAS_STATUS_ALLOC_FAILED|{_BY_NAME}(OUT_OF_MEMORY|MemoryAllocation)\b|{_IN_QUOTES}out of memory'"
)
_OF_NCCL = r"NCCL error[\s\S]{0,2000}Cuda failure (\d+ )?'"
_OOM_OF_NCCL = rf"{_OF_NCCL}out of memory'"
#: The GPU's driver pins memory of the host, and says the same where that ran out.
_PINNING = "alloc_with_pin_memory* (*.py)"
_FAULTS = (
    r"(an illegal memory access|device-side assert|misaligned address|unspecified launch failure"
    r"|an illegal instruction|invalid program counter|the launch timed out)"
)
#: How FlashInfer begins: with the call that failed.
_CALL_FAILED = (
    rf"{_BEFORE}(Check failed: \([^\n]{{1,200}}\) is false: )?[\w ,-]{{1,100}}\b(failed|error)( with error)?( code)?:?"
)
_CUDA_WORDS = (
    rf"{_OF_GPU} ({_FAULTS}|CUBLAS_STATUS_EXECUTION_FAILED)"
    rf"|{_BY_NAME}((?i:ILLEGAL|MISALIGNED|ASSERT)|LAUNCH_FAILED|LaunchFailure)|{_IN_QUOTES}{_FAULTS}"
    rf"|{_CALL_FAILED} {_FAULTS}"
    rf"|{_BEFORE}\[TensorRT-LLM\]\[ERROR\] CUDA runtime error in [^\n]{{1,200}}: {_FAULTS}"
)
_BROKEN_WORDS = rf"{_OF_GPU} uncorrectable (ECC|NVLink) error"
#: Its text goes on with "or a hardware error": a peer that died, or what it had not mapped, brings it about as well.
_PEER_ACCESS = rf"{_OF_GPU} Invalid access of peer GPU memory over nvlink"
_LEAK = r"[\w ]*memory leak detected!"
_MODEL_ERRORS = (
    r"(Can't load|Cannot find any model weights|Unrecognized model|The checkpoint you are trying to load"
    r"|Error no file named|Incorrect path_or_model_id|We couldn't connect to|It looks like the config file"
    r"|.{0,200}(is not a local folder|does not appear to have a file named|is not a valid model identifier"
    r"|is not the path to a directory))"
)
_PORT_WORDS = (
    r"(\[Errno 98\]|The server socket has failed to listen(?![\s\S]*(EACCES|EADDRNOTAVAIL))|Address already in use"
    r"|[\w ]*[Pp]ort( \d+)? is already in use|[\w ]+ at \d+ is not available"
    r"|Could not bind port \d+ on any configured address family)"
)

#: What a driver says that does not fit what was compiled.
_OLD_DRIVER = (
    rf"({_OF_GPU}|{_CALL_FAILED}) (no kernel image is available|invalid device function|the provided PTX was compiled"
    r"|device kernel image is invalid)"
    r"|The NVIDIA driver on your system is too old|Unexpected error from cudaGetDeviceCount[\s\S]{0,300}Error 80[34]:"
    rf"|{_BY_NAME}((?i:INVALID_?(KERNEL_?)?IMAGE|UNSUPPORTED_?PTX)|NO_BINARY_FOR_GPU|NoKernelImage)"
)
#: What FlashInfer, DeepGEMM, DeepEP, Triton and torch say that compile a kernel when it is first used.
_NOT_COMPILED = (
    rf"{_BEFORE}(Ninja build failed|Error building extension '|Failed to compile \S+\.cu\b|Could not find nvcc"
    r"|NVCC (PTX )?compilation failed|Failed to find C(\+\+)? compiler"
    r'|Assertion error \(\S+compiler\.hpp:\d+\): false and "NVCC compilation failed"'
    rf"|{COMPILER_FAILED}|\s*The detected CUDA version \()"
)
_NOT_JOINED = (
    r"\[\d+\] is setting up NCCL communicator[^\n]{0,300} got error: (wait timeout|Socket Timeout)"
    r"|Timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms|The client socket has timed out after"
)

#: The one table, most telling first. What stands above is a word of the kernel's or of the driver's, or follows from
#: somebody else's; then come exceptions, from the particular to any; last what is only known by how it ended.
RULES: tuple[tuple[str, Rule], ...] = (
    ("host_oom", _host_oom),
    ("gpu_hardware", _hardware),
    # Who stands still, and of what.
    ("busy", no_progress.busy),
    ("stopped_process", no_progress.stopped),
    ("rank_divergence", no_progress.divergence),
    ("collective_mismatch", no_progress.mismatch),
    ("starved_process", no_progress.starved),
    ("stuck_in_kernel", no_progress.in_kernel),
    ("weight_update_deadlock", no_progress.weight_update),
    ("symmetric_stall", no_progress.stall),
    ("symmetric_stall", raises("DistBackendError|RuntimeError", _TIMED_OUT)),
    ("rank_stuck", no_progress.rank_stuck),
    ("rank_stuck", no_progress.awaited),
    ("poison_request", lambda case: _suspected(case) if case.is_hang else None),
    ("detokenizer_stuck", no_progress.stuck("detokenizer")),
    ("tokenizer_stuck", no_progress.stuck("server", "tokenizer_worker")),
    ("no_progress", no_progress.no_progress),
    # Whose failure it is, where that is elsewhere.
    ("transfer_stuck", _transfer),
    ("transfer_stuck", raises("KVTransferError")),
    ("transfer_stuck", raises(r"nixl\w+Error", path=_OF_PAIRS.pattern)),
    (
        "transfer_stuck",
        raises("Exception|RuntimeError", "KVSender failed|Transfer thread failed", path=_OF_PAIRS.pattern),
    ),
    ("peer_lost", _peer),
    ("gpu_hardware", raises(r"torch\.AcceleratorError", _BROKEN_WORDS)),
    ("gpu_hardware", raises(_GPU_ERRORS, _BROKEN_WORDS)),
    # What a GPU or the host ran out of.
    ("host_oom", raises(_FROM_GPU, _OOM_WORDS, _PINNING, establishes=False)),
    ("host_oom", raises("RuntimeError", r"cudaHostRegister failed \(rc=2,")),
    ("gpu_oom_at_start", raises(_OOM_CLASS, starting=True)),
    ("gpu_oom_at_start", raises(r"torch\.AcceleratorError", _OOM_WORDS, starting=True)),
    ("gpu_oom_at_start", raises(_GPU_ERRORS, _OOM_WORDS, starting=True)),
    ("gpu_oom_at_start", raises("DistBackendError|RuntimeError", _OOM_OF_NCCL, starting=True)),
    ("gpu_oom_serving", raises(_OOM_CLASS, starting=False)),
    ("gpu_oom_serving", raises(r"torch\.AcceleratorError", _OOM_WORDS, starting=False)),
    ("gpu_oom_serving", raises(_GPU_ERRORS, _OOM_WORDS, starting=False)),
    ("gpu_oom_serving", raises("DistBackendError|RuntimeError", _OOM_OF_NCCL, starting=False)),
    ("cuda_fault", _gpu_said),
    ("cuda_fault", raises(r"torch\.AcceleratorError", _CUDA_WORDS)),
    ("cuda_fault", raises(_GPU_ERRORS, _CUDA_WORDS)),
    ("cuda_fault", raises(_FROM_GPU, _PEER_ACCESS)),
    ("cuda_fault", raises("DistBackendError|RuntimeError", rf"{_OF_NCCL}{_FAULTS}")),
    ("host_oom", raises("MemoryError|_ArrayMemoryError")),
    ("host_oom", raises("OSError", r"\[Errno 12\] Cannot allocate memory")),
    ("host_oom", raises("RuntimeError", r".{0,200}DefaultCPUAllocator: (can't allocate|not enough) memory")),
    ("host_oom", raises("RuntimeError", r"unable to mmap \d+ bytes from file <[^>\n]{1,400}>: Cannot allocate memory")),
    # What HiCache asks before it takes any.
    ("host_oom", raises("ValueError", r"Not enough host memory (available|for)\b")),
    ("shm_exhausted", _no_space_by_signal),
    ("shm_exhausted", raises("OSError", _NO_SPACE, "* (shared_memory.py)")),
    # A semaphore of several processes.
    ("shm_exhausted", raises("OSError", _NO_SPACE, "* (synchronize.py)")),
    ("shm_exhausted", raises("OSError", _NO_SPACE + r".{0,20}/dev/shm")),
    ("shm_exhausted", raises("DistBackendError|RuntimeError", _NO_SEGMENT)),
    ("shm_exhausted", raises("RuntimeError", _NO_FILE_IN_SHM)),
    ("disk_full", raises("OSError|InductorError", rf"(OSError: )?({_NO_SPACE}|\[Errno 122\] Disk quota exceeded)")),
    ("disk_full", raises("RuntimeError|OSError|Exception|SafetensorError", _NO_SPACE_IN_RUST)),
    ("kv_pool_leak", raises("ValueError", _LEAK, "raise_error_or_warn (common.py)")),
    ("kv_pool_leak", raises("ValueError", _LEAK, "*check* (scheduler_runtime_checker_mixin.py)")),
    ("kv_pool_leak", raises("ValueError|AssertionError", _LEAK)),
    (
        "kv_pool_exhausted",
        raises("RuntimeError", r"(Prefill |Decode )?[Oo]ut of memory\. Try to lower", "alloc_* (*.py)"),
    ),
    ("kv_pool_exhausted", raises("RuntimeError", r"alloc_req_slots runs out of memory", "alloc_* (*.py)")),
    (
        "kv_pool_exhausted",
        raises("ValueError", r"Out of memory even after retracting all other requests", "retract_decode (*.py)"),
    ),
    ("poison_request", _poison),
    # The start.
    ("startup_port", raises("DistNetworkError|ZMQError", _PORT_WORDS)),
    ("startup_port", raises("OSError|RuntimeError|ValueError", _PORT_WORDS)),
    ("startup_port", _port_logged),
    ("startup_memory", raises("RuntimeError|ValueError", _TOO_LITTLE, starting=True)),
    ("startup_model", raises("RepositoryNotFoundError|HFValidationError|LocalEntryNotFoundError|GatedRepoError")),
    ("startup_model", raises("SafetensorError", starting=True)),
    ("startup_model", raises("OSError|ValueError|RuntimeError", _MODEL_ERRORS, starting=True)),
    ("startup_version", raises("FileNotFoundError", NO_COMPILER)),
    ("startup_model", raises("FileNotFoundError|PermissionError", path=r"(model_loader|transformers)/", starting=True)),
    ("startup_version", raises("ImportError|ModuleNotFoundError|AttributeError|OSError", r".{0,300}undefined symbol")),
    ("startup_version", raises("ImportError|ModuleNotFoundError", starting=True)),
    ("startup_version", raises("PackageNotFoundError|VersionConflict|DistributionNotFound", starting=True)),
    ("startup_version", raises("AttributeError", r"module '[\w.]+' has no attribute", starting=True)),
    ("startup_version", raises("OSError", r".{0,300}(version `\S+' not found|cannot open shared)", starting=True)),
    ("startup_version", raises("Exception", r"\S+ (is installed with|with minimum required) version ", starting=True)),
    ("startup_version", raises("NVMLError_LibRmVersionMismatch")),
    ("startup_version", raises("ValueError", r"Due to a serious vulnerability issue in `torch\.load`")),
    ("startup_version", raises(_FROM_GPU, _OLD_DRIVER)),
    ("startup_version", raises("RuntimeError|Exception|AssertionError|CalledProcessError", _NOT_COMPILED)),
    ("startup_version", raises("NotImplementedError", r"Could not run 'sgl_kernel::\w+' with arguments from the '")),
    ("startup_model", _model_load),
    ("startup_timeout", _startup_timeout),
    ("startup_timeout", raises("DistStoreError|DistNetworkError|DistBackendError", _NOT_JOINED, starting=True)),
    ("startup_timeout", raises("ValueError", r"TP rank \d+ could finish the model loading, but ")),
    # Who it was says more than how it ended.
    ("asked_to_stop", _asked_to_stop),
    ("asked_to_stop", raises("KeyboardInterrupt")),
    ("detokenizer_lost", _lost("detokenizer")),
    ("tokenizer_lost", _lost("tokenizer_worker", "tokenizer")),
    # Where the main process takes the answers in.
    ("tokenizer_lost", raises(r"\w+", "", "handle_loop (tokenizer_manager.py)")),
    ("rank_divergence", no_progress.aborted(lambda case: case.divergence)),
    ("collective_mismatch", no_progress.aborted(no_progress.first_mismatch)),
    ("rank_stuck", no_progress.aborted(no_progress.first_wait)),
    ("connection_lost", _connection),
    ("poison_request", _suspected),
    *((name, died_of(signal)) for signal, name in _BY_SIGNAL.items()),
    ("fatal_signal", died_of()),
    ("startup_failed", _startup_failed),
    ("exited", raises("SystemExit")),
    ("exception_in_sglang", _exception_in_sglang),
    ("exception", _exception),
    ("exited", _exited),
)
