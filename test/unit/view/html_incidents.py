"""Incidents for the tests of the page: many ranks, a divergence, and everything that somebody hostile might write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_crashkit.model.step import Step, StepRequest
from unit.support.stored import make_incident, poisoned

#: Who failed, of the ranks of `many_ranks`.
FAULTY = 3
#: Ways to have a page run what it is only to show.
HOSTILE = (
    "<script>window.ran = 1</script>",
    "</script><script>window.ran = 2</script>",
    "</style></title></textarea><img src=x onerror='window.ran = 3'>",
    '" onmouseover="window.ran = 4" autofocus onfocus="window.ran = 5" x="',
    '<a href="javascript:window.ran = 6">x</a> javascript:window.ran=7',
    "<iframe srcdoc='<script>parent.ran = 8</script>'></iframe><svg onload='window.ran = 9'>",
    "{{ 12345 * 54321 }}{% raw %}${window.ran = 10}`",
    "line\u2028separator\u2029 <!-- ]]> --> \u202egnp.exe\u202c \u2066bidi\u2069 zero\u200bwidth",
    "null\x00 bell\x07 escape\x1b[31mred\x1b[0m \x9b",
    "lone \udcff surrogate \U000e0041tag",
)
ALL_HOSTILE = " ".join(HOSTILE)
PROMPT = "the secret of a user"


def frames(*names: str) -> list[dict[str, Any]]:
    """Return frames, outermost first in `names`, as a stack file has them."""
    return [{"function": name, "file": f"sglang/{name}.py", "line": 7} for name in reversed(names)]


def step(number: int, mode: str = "decode", **fields: Any) -> dict[str, Any]:
    requests = (StepRequest(f"rid{number}", 1, 20), StepRequest("rid0", 1, 9))
    one = Step(number, number / 10, number / 10 + 0.02, "processed", mode, requests, 2, 2, agreed_hash=number)
    return one.to_json() | fields


def time(seconds: float) -> str:
    return f"2026-01-02T03:04:{seconds:09.6f}Z"


def many_ranks(incidents: Path, count: int, steps: int = 40) -> Path:
    """Write the hang of so many ranks, of which `FAULTY` went another way in the last step but two."""
    processes, pieces = [], {}
    outer = ["<module>", "spawn_main", "_bootstrap", "run_scheduler_process", "event_loop_overlap", "run_batch"]
    diverging = steps - 2
    for tp in range(count):
        pid, title = 1000 + tp, f"sglang::scheduler_TP{tp}"
        inner = ["sample", "topk"] if tp == FAULTY else ["forward", f"layer_{tp % 4}", "all_reduce", "wait"]
        label = f"scheduler_TP{tp}-{pid}"
        threads = [
            {"name": "MainThread", "native_id": pid, "frames": frames(*outer, *inner)},
            {"name": "watchdog", "native_id": pid + 1, "frames": frames("_bootstrap", "run", "_watchdog")},
        ]
        pieces[f"stacks/{label}.json"] = json.dumps({"pid": pid, "title": title, "threads": threads})
        pieces[f"stacks/{label}.txt"] = f"Process {pid}: {title}\n" + "\n".join(outer + inner)
        done = [step(number) for number in range(1, steps)]
        if tp == FAULTY:
            done[diverging - 1] = step(diverging, "extend", tokens=37, decisions={"retract": 1})
        done.append(step(steps, ended=None, phase="forward_begun"))
        pieces[f"ranks/{label}.steps.jsonl"] = "".join(json.dumps(one) + "\n" for one in done)
        state = {"State": "T (stopped)" if tp == 5 else "S (sleeping)", "Threads": "57", "VmRSS": "1284152 kB"}
        evidence = [
            {"kind": "proc_state", "status": "captured"},
            {"kind": "stack", "status": "captured", "path": f"stacks/{label}.txt", "seconds": 0.04, "source": "py-spy"},
            {"kind": "flight_recorder", "status": "skipped", "reason": "NCCL was not initialised"},
            {"kind": "steps", "status": "captured", "path": f"ranks/{label}.steps.jsonl", "seconds": 0.009},
            {"kind": "log", "status": "captured", "path": f"logs/{label}.log"},
        ]
        in_step = {"number": steps, "mode": "decode", "phase": "forward_begun", "seconds": 5.0, "size": 2}
        doing = [f"{name} (sglang/{name}.py:7)" for name in reversed(inner)]
        process = {"pid": pid, "title": title, "role": "scheduler", "rank": {"tp": tp}, "state": state}
        process |= {"doing": doing, "evidence": evidence, "steps": {"last": [], "in_step": in_step}}
        processes.append(process)
    server = {
        "pid": 1,
        "title": "python -m sglang.launch_server",
        "role": "server",
        "rank": {},
        "doing": ["serve (a.py:1)"],
    }
    timeline = [{"time": time(10 + tp / 1000), "event": "no_progress", "pid": 1000 + tp} for tp in range(count)]
    timeline += [{"time": time(17.5), "event": "stacks_captured", "processes": count, "seconds": 1.2}]
    words = f"TP{FAULTY} decided retract on the way to step {diverging} where the others did not."
    requests = [
        {"rid": f"rid{number}", "state": "unfinished", "arrived": time(number / 10), "text": PROMPT, "stream": True}
        | {"sampling_params": {"max_new_tokens": 64, "stop": PROMPT}}
        for number in range(1, 100)
    ]
    pieces["requests/requests.jsonl"] = "".join(json.dumps(one) + "\n" for one in requests)
    pieces["environment.json"] = json.dumps({"model": "tiny", "versions": {"torch": "2.14.1"}, "list": [1, 2, 3]})
    pieces[f"logs/scheduler_TP{FAULTY}-{1000 + FAULTY}.log"] = "".join(f"log line {n}\n" for n in range(200))
    return make_incident(
        incidents,
        kind="hang",
        pieces=pieces,
        processes=[*processes, server],
        timeline=timeline,
        trigger={"event": "no_progress", "time": time(10), "pid": 1000, "title": "sglang::scheduler_TP0"},
        divergence={"kind": "decision", "level": "established", "step": diverging, "statement": words},
        suspects=[{"rid": "rid3", "level": "supported", "reasons": ["it was in the step", "it was retracted"]}],
        requests={"finished": 0, "unfinished": 99, "journal": {"path": "requests/requests.jsonl"}},
        verdict={
            "kind": "hang",
            "level": "established",
            "text": words,
            "basis": [words, f"{count - 1} ranks wait in all_reduce for TP{FAULTY}."],
            "first_failure": {"pid": 1000 + FAULTY, "title": f"sglang::scheduler_TP{FAULTY}"},
        },
        cause={
            "class": "divergence",
            "words": "a rank went another way than the others",
            "level": "established",
            "reasons": [words],
            "next_steps": ["`sglang-crashkit steps latest` shows both ways"],
            "restart_helps": "yes",
            "known_issues": [{"issue": 12345, "title": "Ranks disagree", "fixed_in": "0.5.24"}],
        },
        complete=True,
    )


def hostile(incidents: Path) -> Path:
    """Write an incident in which every text is an attack, those included that the kit reads again."""
    path = many_ranks(incidents, 4, steps=4)
    document = json.loads((path / "incident.json").read_text())
    first, told = document["processes"][FAULTY], ALL_HOSTILE
    first |= {"exit": {"signal": "", "cause": "", "detail": ""}, "gpu": [""], "last_sign": {"doing": ""}}
    first |= {"looks": [{"time": told, "state": "", "doing": [""]}]}
    first["evidence"].append({"kind": told, "status": told, "path": told, "reason": ""})
    document["processes"][0]["steps"]["in_step"]["number"] = ""
    document["timeline"].append({"time": told, "event": ""})
    document["cause"]["known_issues"] = [{"issue": "javascript:window.ran=12", "title": "", "workaround": ""}]
    document |= {
        "server": {"pid": "", "hostname": "", "sglang_version": ""},
        "collectives": {"findings": [{"group": "", "kind": "", "statement": "", "evidence": [""]}], "missing": [""]},
        "gpus": {"lines": [""]},
        "peers": [{"role": told, "address": "", "requests": [{"rid": ""}]}],
        "environment": {"model": ""},
    }
    (path / "incident.json").write_text(json.dumps(poisoned(document, told)))
    for file in [file for folder in ("stacks", "ranks", "requests") for file in (path / folder).glob("*.json*")]:
        texts = [json.dumps(poisoned(json.loads(line), told)) for line in file.read_text().splitlines()]
        file.write_text("\n".join([*texts, told] if file.suffix == ".jsonl" else texts), errors="surrogateescape")
    (path / "environment.json").write_text(json.dumps(poisoned({"": {"": ["", {"": ""}]}, "plain": ""}, told)))
    odd_name = f"{'a' * 100}<img src=x onerror=window.ran=11>.log"
    (path / "logs" / odd_name).write_text(f"{told}\n{'y' * (1 << 20)}\n", errors="surrogateescape")
    (path / "core").write_bytes(b"\0\1\2" * 1000)
    return path
