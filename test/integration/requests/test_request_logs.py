"""With prompts switched off, what a release's own logger of requests writes is not in the log of an incident."""

from __future__ import annotations

import json
import subprocess

import pytest

from lanelib.lanes import Lane

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROMPT = "canary prompt 30f4: sing of the mine"
#: Runs in the release's own environment: all that it logs of a request, and one that another logger shows.
LOG = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.request_logger import RequestLogger
from sglang_crashkit.memory.ring import LogWriter, read_log
from sglang_crashkit.srt.log_handler import RingHandler

ring = LogWriter(200)
logging.getLogger().addHandler(RingHandler(ring, None, set(), quotes=False))
asked = GenerateReqInput(text=sys.argv[1], rid="ab12", sampling_params={})
answer = {"text": sys.argv[1], "meta_info": {"e2e_latency": 1.0}}
for form in ("text", "json"):
    requests = RequestLogger(True, 3, form, ["stdout"])
    requests.log_received_request(asked)
    if hasattr(requests, "log_openai_received_request"):
        requests.log_openai_received_request({"messages": [{"content": sys.argv[1]}]})
    requests.log_finished_request(asked, answer)
    for target in requests.targets:
        # A program may well send them to its own handlers.
        target.propagate = True
    requests.log_received_request(asked)
own = logging.getLogger("sglang.srt.managers.tokenizer_manager")
own.info("Request %s is aborted", asked)
own.warning(json.dumps({"rid": "ab12", "obj": {"text": sys.argv[1]}}))
own.info("last")
print(json.dumps([record.text for record in read_log(ring.fd, 200)]))
"""


def test_no_request_is_kept_that_a_release_logs(lane: Lane) -> None:
    argv = [lane.python, "-c", LOG, PROMPT]
    done = subprocess.run(argv, env=lane.serve_env(), capture_output=True, text=True, timeout=200, check=True)
    assert f"{done.stdout}{done.stderr}".count(PROMPT) > 6
    kept = json.loads(done.stdout.splitlines()[-1])
    assert (len(kept), kept[-1]) == (3, "last")
    assert not [text for text in kept if "canary" in text]
    assert kept[0].startswith("Request GenerateReqInput(")
