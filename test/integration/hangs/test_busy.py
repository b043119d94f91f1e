"""A real server that is busy for long: no incident stays, and one that is seen meanwhile says that it is at work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.import_hook import write_site
from integration.scenario import PATIENCE, serving, worked_on
from lanelib.lanes import Lane, ensure_lane
from lanelib.servers import Server
from sglang_crashkit.incident.store import find_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

RARE = pytest.mark.matrix
HANG_SECS = 3.0
LONG = 400.0
#: An answer that takes some seconds.
LONG_ANSWER = 500
#: An incident of what goes on is removed this soon on a busy machine.
REMOVED_SECS = 60.0
#: More than upstream lets a chunk be on any GPU.
PROMPT_TOKENS = 40_000
PROFILED_STEPS = 200
#: Each way takes at least so long, in seconds: otherwise a hang would not have been noticed either.
BUSY_SECS = 6.0

#: What it changes in the server.
CHANGED = "sglang.srt.model_loader.weight_utils"
#: Runs in every Python process of the server. On SIGUSR1 the main thread compiles Triton kernels, as a batch does that
#: meets a new shape; reading weights takes as long as it does of a real model.
SITECUSTOMIZE = f"""
import os
import signal
import time

BUSY_SECS = {BUSY_SECS}


def compile_kernels(number, frame):
    if "sglang_crashkit" in frame.f_code.co_filename:
        # What runs in a hook is not what the rank does: a moment later.
        return os.kill(os.getpid(), number)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import crashkit_kernel

    began, number = time.monotonic(), 0
    while time.monotonic() < began + 2 * BUSY_SECS:
        number += 1
        source = ASTSource(
            crashkit_kernel.unrolled,
            signature={{"pointer": "*fp32", "COUNT": "constexpr"}},
            constexprs={{(1,): 150 + number}},
        )
        try:
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
        except Exception:
            # Without ptxas, which comes last, it is as it is up to there.
            pass
    with open(os.path.join(os.path.dirname(__file__), f"compiled-{{os.getpid()}}"), "w") as file:
        file.write(str(number))


signal.signal(signal.SIGUSR1, compile_kernels)


def change(module):
    for name in [name for name in vars(module) if name.endswith("safetensors_weights_iterator")]:
        setattr(module, name, slowed(getattr(module, name)))


def slowed(iterate):
    def safetensors_weights_iterator(*args, **kwargs):
        weights = list(iterate(*args, **kwargs))
        for name, weight in weights:
            due = time.monotonic() + 2 * BUSY_SECS / len(weights)
            while time.monotonic() < due:
                weight.clone()
            yield name, weight

    return safetensors_weights_iterator
"""
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def unrolled(pointer, COUNT: tl.constexpr):
    offsets = tl.arange(0, 1024)
    value = tl.load(pointer + offsets)
    for step in tl.static_range(COUNT):
        value = value * 1.5 + tl.load(pointer + offsets + step)
    tl.store(pointer + offsets, value)
"""
#: Weights that fit the lane's model.
SAVE = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[2])
"""


def generate(server: Server, tokens: list[int], new: int) -> int:
    """Have tokens generated after `tokens`, and return how many came."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    answer = server.ask("generate", {"input_ids": tokens, "sampling_params": sampling}, LONG)
    return len(json.loads(answer)["output_ids"])


def profile(server: Server, folder: Path) -> None:
    """Export a trace in the middle of a batch, as a profile of so many steps does."""
    wanted = {"num_steps": PROFILED_STEPS, "with_stack": True, "record_shapes": True, "activities": ["CPU"]}
    server.ask("start_profile", wanted | {"output_dir": str(folder)}, LONG)
    assert generate(server, [1, 2, 3], PROFILED_STEPS + 10) == PROFILED_STEPS + 10


def prefill(server: Server) -> None:
    """Take in a long prompt in one piece."""
    assert generate(server, [7 + number % 400 for number in range(PROMPT_TOKENS)], 2) == 2


def compile_in_a_batch(server: Server, folder: Path) -> None:
    """Let the scheduler compile in the middle of a request."""
    pid, log_from = server.pid_of("sglang::scheduler"), server.log_path.stat().st_size

    def interrupt() -> None:
        wait_until(lambda: worked_on(server, log_from), "the request is worked on", LONG)
        os.kill(pid, signal.SIGUSR1)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    assert generate(server, [1, 2, 3], LONG_ANSWER) == LONG_ANSWER
    interrupting.join(LONG)
    assert int((folder / f"compiled-{pid}").read_text()) > 0


def update_weights(server: Server, model: Path) -> None:
    """Load other weights while requests come."""
    asked: list[Future[int]] = []

    def send() -> None:
        for _ in range(20):
            asked.append(pool.submit(generate, server, [5, 6], 4))
            time.sleep(0.1)

    with ThreadPoolExecutor(21) as pool:
        sender = pool.submit(send)
        time.sleep(0.5)
        answer = server.ask("update_weights_from_disk", {"model_path": str(model), "load_format": "auto"}, LONG)
        sender.result()
    done = json.loads(answer)
    assert done["success"], done
    assert [one.result() for one in asked] == [4] * 20


def write_weights(lane: Lane, folder: Path) -> Path:
    """Write random weights of a lane's model into a folder, and return that."""
    command = [str(lane.python), "-c", SAVE, str(lane.model_dir), str(folder)]
    subprocess.run(command, env=lane.serve_env(), check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def crash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="module")
def ways(crash: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[], None]]]:
    """What keeps a server busy, by name."""
    lane = ensure_lane("0.5.23")
    hook, model = tmp_path_factory.mktemp("hook"), tmp_path_factory.mktemp("model")
    environ = PATIENCE | write_site(hook, SITECUSTOMIZE, CHANGED)
    (hook / "crashkit_kernel.py").write_text(KERNEL)
    weights = write_weights(lane, model)
    tokens = str(PROMPT_TOKENS + 4096)
    arguments = ["--chunked-prefill-size", "-1", "--max-total-tokens", tokens, "--context-length", tokens]
    arguments += ["--max-prefill-tokens", tokens, "--disable-radix-cache"]
    environ |= {
        "SGLANG_CRASHKIT_HANG_SECS": f"{HANG_SECS:g}",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "TRITON_CACHE_DIR": str(hook / "triton"),
    }
    with serving(lane, crash, *arguments, env=environ) as server:
        # Later batches have less patience than the first ones.
        generate(server, [1, 2, 3], 20)
        yield {
            "profile": lambda: profile(server, hook),
            "compile": lambda: compile_in_a_batch(server, hook),
            "weights": lambda: update_weights(server, weights),
            "prefill": lambda: prefill(server),
        }
        assert server.popen.poll() is None


@pytest.mark.parametrize(
    "way", [pytest.param("profile", marks=RARE), "compile", "weights", pytest.param("prefill", marks=RARE)]
)
def test_what_is_busy_is_no_hang(ways: dict[str, Callable[[], None]], crash: Path, way: str) -> None:
    said: set[tuple[str, str]] = set()
    done = threading.Event()

    def poll() -> None:
        while not done.wait(0.1):
            for stored in find_incidents(crash):
                # An incident that was opened just now has no document yet.
                if verdict := (stored.document or {}).get("verdict"):
                    said.add((str(verdict.get("kind")), str(verdict.get("text"))))

    poller = threading.Thread(target=poll)
    poller.start()
    began = time.monotonic()
    try:
        ways[way]()
    finally:
        secs = time.monotonic() - began
        # Progress is noticed at the second sign of it; before, an incident might still come.
        time.sleep(2.0)
        end = time.monotonic() + REMOVED_SECS
        while find_incidents(crash) and time.monotonic() < end:
            time.sleep(0.1)
        done.set()
        poller.join(LONG)
    assert secs > BUSY_SECS
    assert [str(stored.path) for stored in find_incidents(crash)] == [], said
    # Before the first look it is known of no one what he does.
    assert {kind for kind, _text in said} <= {"busy", "hang", "unknown"}, said
