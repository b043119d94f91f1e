"""A real server that is busy for long: no incident stays, and one that is seen meanwhile says that it is at work."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.hangs import busy_story
from integration.hangs.busy_story import BUSY_SECS, CHANGED, HANG_SECS, KERNEL, SITECUSTOMIZE
from integration.import_hook import write_site
from integration.scenario import PATIENCE, serving
from lanelib.lanes import Lane, ensure_lane

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

RARE = pytest.mark.matrix
#: Weights that fit the lane's model.
SAVE = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[2])
"""


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
    tokens = str(busy_story.PROMPT_TOKENS + 4096)
    arguments = ["--chunked-prefill-size", "-1", "--max-total-tokens", tokens, "--context-length", tokens]
    arguments += ["--max-prefill-tokens", tokens, "--disable-radix-cache"]
    environ |= {
        "SGLANG_CRASHKIT_HANG_SECS": f"{HANG_SECS:g}",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "TRITON_CACHE_DIR": str(hook / "triton"),
    }
    with serving(lane, crash, *arguments, env=environ) as server:
        # Later batches have less patience than the first ones.
        busy_story.generate(server, [1, 2, 3], 20)
        yield {
            "profile": lambda: busy_story.profile(server, hook),
            "compile": lambda: busy_story.compile_in_a_batch(server, hook),
            "weights": lambda: busy_story.update_weights(server, weights),
            "prefill": lambda: busy_story.prefill(server),
        }
        assert server.popen.poll() is None


@pytest.mark.parametrize(
    "way", [pytest.param("profile", marks=RARE), "compile", "weights", pytest.param("prefill", marks=RARE)]
)
def test_what_is_busy_is_no_hang(ways: dict[str, Callable[[], None]], crash: Path, way: str) -> None:
    busy = busy_story.watch(crash, ways[way])
    assert busy.problem == "", busy
    assert busy.secs > BUSY_SECS, busy
    assert busy.left == [], busy
    # Before the first look it is known of no one what he does.
    assert {kind for kind, _text in busy.verdicts} <= {"busy", "hang", "unknown"}
