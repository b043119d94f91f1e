"""What a request does to a server that is made to break on it, from outside of SGLang."""

from __future__ import annotations

from pathlib import Path

from integration.import_hook import write_site

#: Runs in every Python process of the server, and has a scheduler look at each batch before it is computed. A fault is
#: named by the environment variable POISON; a prompt is told by the token ids that it begins with.
_SITECUSTOMIZE = """
import ctypes
import os
import time

MARK = [7, 7, 7]
hoard = []


def marked(requests):
    return [one for one in requests if list(one.origin_input_ids[:3]) == MARK]


def token(requests):
    if any(11 in one.origin_input_ids for one in requests):
        raise IndexError("no such token")


def segv(requests):
    if marked(requests):
        ctypes.string_at(8)


def hang(requests):
    while marked(requests):
        time.sleep(0.1)


def length(requests):
    longest = max((len(one.origin_input_ids) for one in requests), default=0)
    if longest > 100:
        # What is taken from now on is of a small memory cgroup.
        with open(os.environ["POISON_CGROUP"] + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        hoard.append(b"x" * (longest * longest << 12))


def change(module):
    forward = module.TpModelWorker.forward_batch_generation
    fault = globals()[os.environ["POISON"]]

    def looked_at(self, batch, *args, **kwargs):
        fault(getattr(batch, "reqs", None) or ())
        return forward(self, batch, *args, **kwargs)

    module.TpModelWorker.forward_batch_generation = looked_at

"""
MARK = [7, 7, 7]


def poisoned(folder: Path, fault: str) -> dict[str, str]:
    """Return the environment of a server that breaks by a fault of the hook above, which is written to a folder."""
    return write_site(folder, _SITECUSTOMIZE, "sglang.srt.managers.tp_worker") | {"POISON": fault}
