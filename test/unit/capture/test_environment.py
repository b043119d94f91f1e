from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.capture import environment
from sglang_crashkit.kernel import cgroup

PRESSURE = "some avg10=1.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=3\n"
PARSED = {
    "some": {"avg10": 1.5, "avg60": 0.0, "avg300": 0.0, "total": 7},
    "full": {"avg10": 0.0, "avg60": 0.0, "avg300": 0.0, "total": 3},
}


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of ``/proc``, of a process 7."""
    (tmp_path / "proc" / "7").mkdir(parents=True)
    for module in (environment, cgroup):
        monkeypatch.setattr(module, "PROC", tmp_path / "proc")
    return tmp_path / "proc"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


V2 = {
    "pod/memory.max": "4000\n",
    "pod/own/memory.max": "max\n",
    "pod/own/memory.high": "max\n",
    "pod/own/memory.current": "1000\n",
    "pod/own/memory.peak": "3999\n",
    "pod/own/memory.events": "low 0\nmax 9\noom_kill 2\n",
    "pod/own/memory.pressure": PRESSURE,
    "pod/own/cpu.stat": "nr_throttled 4\n",
    "pod/own/pids.current": "12\n",
    "pod/own/pids.max": "max\n",
}
V1 = {
    "memory.usage_in_bytes": "1000\n",
    "memory.limit_in_bytes": "9223372036854771712\n",
    "memory.max_usage_in_bytes": "2000\n",
    "memory.failcnt": "5\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
}


@pytest.mark.parametrize(
    ("membership", "mount", "files", "expected"),
    [
        (
            "0::/pod/own",
            "cgroup2 {} cgroup2 rw 0 0",
            V2,
            {
                "memory": {
                    "version": 2,
                    "used_bytes": 1000,
                    "peak_bytes": 3999,
                    "limit_bytes": 4000,
                    "events": {"low": 0, "max": 9, "oom_kill": 2},
                    "pressure": PARSED,
                },
                "cpu": {"version": 2, "events": {"nr_throttled": 4}},
                "pids": {"version": 2, "used": 12},
            },
        ),
        (
            # A container: the path is the host's, and the mount is the group.
            "9:cpuset:/docker/abc\n4:memory:/docker/abc\n0::/",
            "cgroup {} cgroup rw,memory 0 0",
            V1,
            {
                "memory": {
                    "version": 1,
                    "used_bytes": 1000,
                    "peak_bytes": 2000,
                    "limit_hits": 5,
                    "events": {"oom_kill_disable": 0, "under_oom": 0, "oom_kill": 1},
                }
            },
        ),
        ("0::/", "tmpfs {} tmpfs rw 0 0", {}, {}),
    ],
    ids=["v2", "v1", "none"],
)
def test_what_a_cgroup_allows_and_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    proc: Path,
    membership: str,
    mount: str,
    files: dict[str, str],
    expected: dict[str, Any],
) -> None:
    group = tmp_path / "cgroup"
    write(group, files)
    write(tmp_path, {"mounts": f"proc /proc proc rw 0 0\n{mount.format(group)}\n", "proc/7/cgroup": membership + "\n"})
    monkeypatch.setattr(cgroup, "MOUNTS", tmp_path / "mounts")
    found = environment.read_cgroups(7)
    memory, counter = found.get("memory"), cgroup.find_counter(7)
    if memory is not None:
        counts = Path(memory["path"], "memory.events" if memory["version"] == 2 else "memory.oom_control")
        assert counter == cgroup.OomCounter(counts, memory["events"]["oom_kill"])
    assert (counter is None) == (memory is None)
    paths = {facts.pop("path") for facts in found.values()}
    assert found == expected
    assert paths <= {str(group), str(group / "pod/own")}


def test_the_limits_of_a_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = environment.read_process(os.getpid())
    assert found["limits"]["open_files"] == {"soft": soft, "hard": hard}
    assert found["open_files"] > 2
    assert environment.read_process(1 << 22) == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: 12\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("", None),
    ],
)
def test_the_version_of_the_driver(proc: Path, text: str, version: str | None) -> None:
    write(proc, {"driver/nvidia/version": text})
    assert environment.read_driver() == version


ID, POD = "0123456789abcdef" * 4, "0a1b2c3d-1111-2222-3333-444455556666"


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({}, {}, {}),
        ({"7/cgroup": f"0::/docker/{ID}\n"}, {}, {"container": ID}),
        (
            {
                "7/cgroup": "0::/\n",
                "7/mountinfo": f"1 2 8:1 /var/lib/kubelet/pods/{POD}/etc-hosts /etc/hosts rw - ext4 /dev/sda rw\n"
                f"1 2 8:1 /var/lib/docker/containers/{ID}/hostname /etc/hostname rw - ext4 /dev/sda rw\n",
            },
            {"POD_NAME": "llm-0"},
            {"container": ID, "kubernetes": {"pod_name": "llm-0", "pod_uid": POD}},
        ),
        (
            {"7/cgroup": f"0::/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope\n"},
            {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1"},
            {"container": ID, "kubernetes": {"pod_uid": POD}, "slurm": {"job_id": "5", "node": "n1"}},
        ),
    ],
    ids=["nowhere", "docker", "kubernetes", "slurm"],
)
def test_where_a_process_runs(
    proc: Path, files: dict[str, str], environ: dict[str, str], expected: dict[str, Any]
) -> None:
    write(proc, files)
    assert environment.read_place(7, environ) == expected


def test_versions_are_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"torch/__init__.py": "raise RuntimeError", "torch/version.py": "cuda: Optional[str] = '12.8'\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    found = environment.read_versions()
    assert (found["cuda"], "hip" in found) == ("12.8", False)
    assert found["sglang-crashkit"]
