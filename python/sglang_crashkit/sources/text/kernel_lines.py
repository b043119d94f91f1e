"""Parses lines of the kernel's log about memory, a GPU, a device or a process."""

from __future__ import annotations

import re
from typing import Any

#: The kinds of `model.event.Kernel` and their patterns; named groups become fields or facts of the event.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "xid",
            r"NVRM: Xid \((?:PCI:)?(?P<gpu>[\w:.]{1,24})\): (?P<number>\d+)"
            r"(?:, pid='?(?P<pid>\d+)'?)?(?:, name=(?P<name>[\w:.-]+))?",
        ),
        ("gpu_memory", r"NVRM: .{0,120}\[NV_ERR_NO_MEMORY\]"),
        (
            "oom_kill",
            r"(?:Memory cgroup out of memory|Out of memory(?: \(\w+\))?): (?:OOM )?[Kk]ill(?:ed)? process "
            r"(?P<pid>\d+) \((?P<name>[^)]{1,32})\)(?:.{0,40}?total-vm:\d+kB)?(?:, anon-rss:(?P<anon_kb>\d+)kB)?",
        ),
        ("oom_kill", r"oom-kill:constraint=\w+.{0,400}?,task=(?P<name>[^,]{1,32}),pid=(?P<pid>\d+)"),
        ("oom_kill", r"(?P<name>[\w:. -]{1,32}) invoked oom-killer"),
        # A line of ``memory.events``, a file of the memory cgroup.
        ("oom_count", r"^oom_kill (?P<number>[1-9]\d{0,8})$"),
        (
            "segfault",
            r"(?P<name>[\w:.-]{1,32})\[(?P<pid>\d+)\]: segfault at (?:.{0,200}? in (?P<library>[^\s\[]{1,120}))?",
        ),
        ("trap", r"traps: (?P<name>[\w:.-]{1,32})\[(?P<pid>\d+)\] [\w ]{1,40}? ip:"),
        (
            "hung_task",
            r"INFO: task (?P<name>[\w:./-]{1,32}):(?P<pid>\d+) blocked for more than (?P<number>\d+) seconds",
        ),
        (
            "amdgpu",
            r"amdgpu.{0,80}?(?:page fault|VM_L2_PROTECTION_FAULT|GPU reset|ring \S+ timeout(?! is)|GPU is lost)",
        ),
        ("amdgpu", r"amdgpu.{0,80}?(?:RAS|uncorrectable|poison|MES failed)"),
        ("amdgpu", r"amdgpu: +(?:for )?[Pp]rocess (?P<name>[\w:.-]{1,32}) pid (?P<pid>\d+)"),
        ("nvlink", r"(?i)(?:nvlink|nvswitch|SXid).{0,120}?(?:error|fatal|fault|down|failed)"),
        ("gpu_lost", r"(?i)NVRM: .{0,120}?(?:has fallen off the bus|GPU .{0,40}lost|RmInitAdapter failed)"),
        ("mce", r"(?i)(?:mce: \[Hardware Error\]|Machine check|EDAC .{0,80}(?:UE|CE) )"),
        ("pcie", r"(?i)(?:pcieport|AER).{0,160}?(?:fatal|uncorrected|surprise|link down|slot\(\S{1,20}\): )"),
        ("disk", r"(?i)I/O error|EXT4-fs error|XFS .{0,60}(?:error|corruption)|nvme.{0,60}(?:timeout|reset|I/O)"),
        ("disk", r"(?i)nfs: server .{1,80} not responding|blk_update_request"),
        (
            "net",
            r"(?i)(?:mlx5_core|bnxt|ib_|eth\d|ens\w{1,12}|bond\d).{0,160}?(?:link (?:is )?down|error|timeout|failed)",
        ),
        ("net", r"(?i)(?:mlx5_core|bnxt|ib_|eth\d|ens\w{1,12}|bond\d).{0,160}?health compromised"),
    )
)


def parse(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the kind of a kernel line and its facts; None if the line is of no such kind."""
    for kind, pattern in _PATTERNS:
        if match := pattern.search(text[:2000]):
            return kind, {name: value for name, value in match.groupdict().items() if value}
    return None


def is_telling(text: str) -> bool:
    """Return whether a line without the kernel's prefix contains words that only the kernel logs."""
    return (
        "NVRM: Xid" in text
        or "[NV_ERR_NO_MEMORY]" in text
        or "oom-kill:constraint" in text
        or "invoked oom-killer" in text
        or "ut of memory: Kill" in text
        or re.match(r"oom_kill [1-9]\d{0,8}$", text) is not None
        or ("segfault at " in text and " ip " in text)
        or ("blocked for more than" in text and "INFO: task" in text)
    )
