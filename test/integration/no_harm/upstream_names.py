"""A program for the python of a lane: it looks at a patched SGLang by upstream's names and prints JSON."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

MODULE = "sglang.srt.utils.cudacore_pyspy_dump_utils"
FUNCTIONS = [
    "collect_scheduler_processes",
    "_is_sglang_scheduler_process",
    "pyspy_dump_schedulers",
    "trigger_cuda_user_coredump",
    "_resolve_cuda_coredump_pipe_path",
]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def look_at_module() -> dict[str, Any]:
    from sglang.srt.utils import cudacore_pyspy_dump_utils as dump_utils
    from sglang.srt.utils.common import pyspy_dump_schedulers as at_old_place

    found: dict[str, Any] = {
        "functions": [name for name in FUNCTIONS if callable(getattr(dump_utils, name, None))],
        "seams": [name for name in ("os", "subprocess", "time", "psutil") if hasattr(dump_utils, name)],
        "scheduler_only": inspect.signature(dump_utils.pyspy_dump_schedulers).parameters["scheduler_only"].default,
        "logger": dump_utils.logger.name,
    }
    commands: list[Any] = []
    process = SimpleNamespace(pid=2**22 + 1, cwd=lambda: "/work", cmdline=lambda: ["sglang::scheduler_TP0"])
    done = SimpleNamespace(stdout="a stack")
    with (
        mock.patch(f"{MODULE}.collect_scheduler_processes", return_value=[process]),
        mock.patch(f"{MODULE}.subprocess.run", side_effect=lambda command, **_: commands.append(command) or done),
        mock.patch(f"{MODULE}.os.open", return_value=99) as opened,
        mock.patch(f"{MODULE}.os.write") as written,
        mock.patch(f"{MODULE}.os.close"),
        mock.patch(f"{MODULE}.time.time", return_value=5.5),
        mock.patch.dict(os.environ, {"CUDA_COREDUMP_PIPE": "/pipes/%p.%t", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}),
    ):
        dump_utils.pyspy_dump_schedulers(scheduler_only=True)
        at_old_place(scheduler_only=True)
        dump_utils.trigger_cuda_user_coredump(scheduler_only=True)
        found |= {"opened": str(opened.call_args.args[0]), "written": written.call_args.args[1].decode()}
    found["dumped"] = [str(process.pid) in str(command) for command in commands]
    return found


def look_at_flags() -> dict[str, Any]:
    from sglang.srt.environ import envs

    names = [
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS",
        "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION",
    ]
    found = {name: getattr(envs, name).get() for name in names}
    with mock.patch.dict(os.environ, {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false"}):
        found["read"] = envs.SGLANG_PYSPY_DUMP_BEFORE_CRASH.get()
    return found


def look_at_watchdog() -> dict[str, Any]:
    from sglang.srt.utils import watchdog

    dumped = threading.Event()
    with mock.patch.object(watchdog, "pyspy_dump_schedulers", side_effect=dumped.set):
        watchdog.WatchdogRaw("test", get_counter=lambda: 0, is_active=lambda: True, watchdog_timeout=0.1, soft=True)
        return {"dumped": dumped.wait(30)}


def resolve(model: str, *arguments: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    server_args = prepare_server_args(["--model-path", model, "--load-format", "dummy", *cpu, *arguments])
    # From 0.5.20 on, arguments are resolved by the process that launches.
    getattr(server_args, "resolve_once", lambda: None)()
    return server_args


def look_at_arguments(model: str, folder: Path) -> dict[str, Any]:
    (folder / "file").write_text("")
    cases: dict[str, tuple[dict[str, str], list[str]]] = {
        "without": ({}, []),
        "with": ({"CUDA_COREDUMP_SHOW_PROGRESS": "0"}, ["--crash-dump-folder", str(folder / "crash")]),
        "hopeless": ({}, ["--crash-dump-folder", str(folder / "file" / "sub")]),
    }
    found: dict[str, Any] = {}
    for case, (environ, arguments) in cases.items():
        log = Lines()
        # SGLang takes the handlers of the root away while it reads its arguments.
        logger = logging.getLogger("sglang_crashkit")
        logger.addHandler(log)
        logger.setLevel(logging.INFO)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        with mock.patch.dict(os.environ, clean | environ, clear=True):
            server_args = resolve(model, *arguments)
            by_resolution = cuda_variables()
            for name in by_resolution.keys() - environ.keys():
                del os.environ[name]
            server_args._handle_crash_dump_env()
            found[case] = {"set": by_resolution, "by_name": cuda_variables()}
        logger.removeHandler(log)
        found[case]["log"] = [line for line in log.lines if "CUDA_" in line or "GPU core" in line]
    return found


def cuda_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_") and "CORE" in name}


def main(model: str, folder: str) -> None:
    found = {
        "module": look_at_module(),
        "flags": look_at_flags(),
        "watchdog": look_at_watchdog(),
        "arguments": look_at_arguments(model, Path(folder)),
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
