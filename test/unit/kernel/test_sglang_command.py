from __future__ import annotations

import pytest

from sglang_crashkit.kernel.sglang_command import may_run_sglang, runs_sglang

#: What the word in their names is all that tells of.
CALLED_SO = (
    "python3 -m dynamo.sglang",
    "python3 -m dynamo.sglang.worker --tp 2",
    "python3 /opt/run_sglang.py",
    "python3 /opt/dynamo-sglang",
    "/venv/bin/python3.11 -u launch_sglang_2.py",
)


@pytest.mark.parametrize(
    ("cmdline", "runs"),
    [
        ("python3 -m sglang.launch_server --tp 2", True),
        ("/venv/bin/python3.11 -u -X dev -m sglang.launch_server", True),
        ("/venv/bin/python /venv/bin/sglang serve", True),
        ("python /opt/sglang/python/sglang/launch_server.py", True),
        ("python -m sglang.bench_one_batch", True),
        ("python -m sglang.bench_serving", False),
        ("python -m sglang_router.launch_router", False),
        ("python -m sglang.srt.disaggregation.launch_lb", False),
        ("python /venv/bin/sglang_router launch", False),
        ("python -m sglang_crashkit collect", False),
        ("/venv/bin/python /venv/bin/sglang-crashkit collect", False),
        ("python train.py --engine sglang", False),
        ("python /home/me/sglang/notes.py", False),
        ("python -c import_sglang", False),
        ("python", False),
        ("vim sglang/launch_server.py", False),
        ("grep -m sglang.launch_server", False),
        ("", False),
        *((program, False) for program in CALLED_SO),
    ],
)
def test_only_pythons_own_module_or_script_tells_that_sglang_runs(cmdline: str, runs: bool) -> None:
    assert runs_sglang(cmdline.split(" ")) is runs
    # setproctitle may leave the whole command line as one argument.
    assert runs_sglang([cmdline]) is runs


@pytest.mark.parametrize("cmdline", [*CALLED_SO, "python3 -m sglang.launch_server"])
def test_what_is_called_so_may_run_it(cmdline: str) -> None:
    assert may_run_sglang(cmdline.split(" "))
    assert may_run_sglang([cmdline])


@pytest.mark.parametrize(
    "cmdline",
    [
        "python3 -m sglang_crashkit collect",
        "python3 -I -S -m sglang_crashkit.handler",
        "/venv/bin/python /venv/bin/sglang-crashkit collect --pid 1",
        "python -m pytest test/test_sglang.py",
        "python /venv/bin/pytest -k sglang",
        "python test_sglang.py",
        "python -m sglang.bench_serving",
        "python -m sglang_router.launch_router",
        "python /venv/bin/sglang-router launch",
        "python sglang_client.py",
        "python eval_sglang.py",
        "python train.py --engine sglang",
        "python /home/me/sglang/notes.py",
        "python /home/me/run_sglang/train.py",
        "python -c import_sglang",
        "vim run_sglang.py",
        "bash -c 'python run_sglang.py'",
        "tail -f run_sglang.log",
        "",
    ],
)
def test_what_has_no_model_or_is_no_python_does_not(cmdline: str) -> None:
    assert not may_run_sglang(cmdline.split(" "))
    assert not may_run_sglang([cmdline])
