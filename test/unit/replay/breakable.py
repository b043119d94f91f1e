"""A server that breaks on some requests and leaves an incident, as a patched one does; run as a program.

Its rule is an expression over ``bodies``, the requests under way, and ``served``, how many it got so far.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sglang_crashkit.kernel.private_files import make_private_folder
from unit.support.stored import make_incident

VERDICT = {"kind": "exception", "text": "It raised.", "level": "established"}
#: A request that breaks it, and the rule by which it does.
POISON = {"return_logprob": True, "top_logprobs_num": 600}
BY_PARAMETERS = "any(b.get('return_logprob') and b.get('top_logprobs_num', 0) > 512 for b in bodies)"


def incident(folder: Path, *bodies: dict[str, Any], suspects: list[str] | None = None) -> Path:
    """Write an incident of these requests, the first of which has id 0, among innocent ones."""
    lines = [
        {
            "rid": str(number),
            "state": "unfinished",
            "arrived": f"2026-01-01T00:00:{number:02}.000000Z",
            "sampling_params": {"max_new_tokens": 4, "temperature": 0.5},
            "stream": False,
            **body,
        }
        for number, body in enumerate([*bodies, *({"text": f"innocent {number}"} for number in range(12))])
    ]
    rank = {"pid": 9, "role": "scheduler", "title": "x", "doing": ["forward (model.py:1)"]}
    return make_incident(
        folder / "host" / "incidents",
        kind="exception",
        pieces={"requests/requests.jsonl": "".join(json.dumps(line) + "\n" for line in lines)},
        verdict=VERDICT | {"first_failure": {"pid": 9, "title": "x"}},
        processes=[rank],
        suspects=[{"rid": rid} for rid in suspects or ()],
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--rule", "--host", "--port", "--api-key", "--crash-dump-folder", "--what", "--keep"):
        parser.add_argument(name)
    parser.add_argument("--hold", type=float, default=0.05)
    args = parser.parse_args()
    sys.stdout.write(f"{args}\n")
    sys.stdout.flush()
    under_way: dict[int, dict[str, object]] = {}
    lock, served = threading.Lock(), 0

    def breaks() -> bool:
        bodies = list(under_way.values())
        return bool(eval(args.rule, {"bodies": bodies, "served": served}))

    def end() -> None:
        folder = make_private_folder(Path(args.crash_dump_folder) / "host" / "incidents")
        rank = {"pid": 9, "role": "scheduler", "title": "x", "doing": [f"{args.what} (model.py:1)"]}
        failure = {"first_failure": {"pid": 9, "title": "x"}}
        make_incident(folder, kind="exception", verdict=VERDICT | failure, processes=[rank])
        os._exit(1)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            nonlocal served
            data = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(data)
            if args.keep:
                Path(args.keep).write_bytes(data)
            with lock:
                served += 1
                under_way[id(body)] = body
                if breaks():
                    end()
            time.sleep(args.hold)
            with lock:
                if breaks():
                    end()
                del under_way[id(body)]
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", int(args.port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
