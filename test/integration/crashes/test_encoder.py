"""An encoder-only server, whose main process is its first rank and serves on without the others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from integration.import_hook import write_site
from integration.scenario import PATIENCE, handlers_of, serving
from lanelib.lanes import ensure_lane
from sglang_crashkit.cli.commands.status import find_running_servers
from sglang_crashkit.incident.store import find_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

NOTICED_S = 60.0
#: A tiny model that sees, as Qwen2-VL's own files have it.
CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "torch_dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
    "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "in_chans": 3},
}
PROCESSOR = {"processor_class": "Qwen2VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
#: sglang-kernel's build for a CPU lacks some operators that SGLang takes for granted there, and 0.5.9 asks for NCCL.
KERNELS = """
def change(module):
    kind = type(module.ops.sgl_kernel)
    find = kind.__getattr__
    def find_or_none(self, name):
        try:
            return find(self, name)
        except AttributeError:
            if not name.endswith("_cpu"):
                raise
    kind.__getattr__ = find_or_none
    make, group = module.distributed.init_process_group, module.distributed.new_group
    module.distributed.init_process_group = lambda *_, **more: make(**more | {"backend": "gloo"})
    module.distributed.new_group = lambda ranks=None, **more: group(ranks, **more | {"backend": "gloo"})
"""


@pytest.mark.parametrize("release", ["0.5.9", "0.5.23"])
def test_a_killed_rank_is_told_and_the_server_is_left_to_upstream(release: str, tmp_path: Path) -> None:
    lane, folder, model = ensure_lane(release), tmp_path / "crash", tmp_path / "model"
    # A vision model with the tokenizer of the lane's own.
    model.mkdir()
    tokenizer = json.loads((lane.model_dir / "tokenizer_config.json").read_text())
    (model / "tokenizer.json").write_bytes((lane.model_dir / "tokenizer.json").read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"processor_class": "Qwen2VLProcessor"}))
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (model / "config.json").write_text(json.dumps(CONFIG))
    options = ["--encoder-only", "--model-path", str(model)]
    env = PATIENCE | {"SGLANG_DISABLED_MODEL_ARCHS": ""} | write_site(tmp_path, KERNELS, "torch")
    with serving(lane, folder, *options, tp=2, env=env) as server:
        (rank,) = (pid for pid, title in server.processes() if "spawn_main" in title)
        watched = [one for one in find_running_servers() if one.pid in dict(server.processes())]
        assert [[one.handler] for one in watched] == [handlers_of(server)]
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: any(one.finished for one in find_incidents(folder)), "it is told", NOTICED_S)
        assert server.popen.poll() is None
    (stored,) = find_incidents(folder)
    assert stored.document["kind"] == "killed"
    assert stored.document["verdict"]["first_failure"] == {"pid": rank, "title": "sglang::encoder_TP1"}
