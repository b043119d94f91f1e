"""Facts of a machine on which nothing is wrong, to be spoilt one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_crashkit.capture.gpu_facts import GpuFacts
from sglang_crashkit.doctor.facts import EndFacts, Facts, Installation, ServerFacts, SharedMemoryFacts, TracingFacts
from sglang_crashkit.doctor.folder_facts import FolderFacts
from sglang_crashkit.doctor.rules import Finding, judge
from sglang_crashkit.policy import Mode
from sglang_crashkit.settings import Settings

GB = 1 << 30
FOLDER = FolderFacts("/crash", file_system="ext4", total=100 * GB, free=50 * GB, max_use=4 * GB, keep_free=GB)
SERVER = ServerFacts(7, ("python", "-m", "sglang.launch_server"), Mode.SERVER, 8)


def facts(environ: dict[str, str] | None = None, **changes: Any) -> Facts:
    """Return the facts, with some of them changed."""
    environ = environ or {}
    healthy = Facts(
        installation=Installation("patched", "SGLang 0.5.23", range="19 releases, 0.5.9 to 0.5.23"),
        servers=(SERVER,),
        environ=environ,
        arguments=("--crash-dump-folder", "/crash"),
        settings=Settings.from_environ(environ),
        tracing=TracingFacts("/bin/py-spy", "py-spy 0.4.2"),
        has_gpu=True,
        gpu=GpuFacts({"version": "580.1", "gpus": 8}),
        debugger="cuda-gdb",
        debugger_missing="",
        folder=FOLDER,
        has_own_folder=True,
        shared_memory=SharedMemoryFacts(64 * GB, 60 * GB, "tmpfs"),
        end=EndFacts(90.0, "systemd", "sglang.service"),
        place={},
    )
    return replace(healthy, **changes)


def findings_on(topic: str, its: Facts) -> list[Finding]:
    """Return what is found of one topic."""
    return [finding for finding in judge(its) if finding.topic == topic]
