"""Let a process of a real server that takes requests in, or gives answers out, not come back to its event loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from integration.import_hook import write_site

#: ``spin`` uses its CPU; ``block`` waits in the kernel, as for a lock; ``rest`` is back in 3 s.
Way = Literal["spin", "block", "rest"]
#: Who hangs, by title: the main process, or a worker, as it takes in a prompt; the detokenizer at the tokens of one.
TOKENIZER, DETOKENIZER = "tokenizer", "detokenizer"

_MODULES = ("sglang.srt.managers.tokenizer_manager", "sglang.srt.managers.detokenizer_manager")
_CODE = """
import functools
import os
import time

FOLDER = os.path.dirname(__file__)


def stick(place):
    path = os.path.join(FOLDER, place)
    try:
        with open(path) as file:
            way = file.read()
    except OSError:
        return
    if way == "spin":
        while os.path.exists(path):
            pass
    elif way == "block":
        with open(os.path.join(FOLDER, "fifo")):
            pass
    elif way == "rest":
        try:
            os.unlink(path)
        except FileNotFoundError:
            # Another worker came by at the same moment, and rests.
            return
        time.sleep(3)


def change(module):
    if module.__name__.endswith("detokenizer_manager"):
        kind, name = module.DetokenizerManager, "handle_batch_token_id_out"
        handle = getattr(kind, name)

        @functools.wraps(handle)
        def changed(*args, **kwargs):
            stick("detokenizer")
            return handle(*args, **kwargs)
    else:
        kind, name = module.TokenizerManager, "_tokenize_one_request"
        tokenize = getattr(kind, name)

        @functools.wraps(tokenize)
        async def changed(*args, **kwargs):
            stick("tokenizer")
            return await tokenize(*args, **kwargs)
    setattr(kind, name, changed)

"""


class StuckLoop:
    """Makes processes of servers stuck that were started with its environment; it has a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environ = write_site(folder, _CODE, *_MODULES)
        os.mkfifo(folder / "fifo")

    def stick(self, place: str, way: Way) -> None:
        """Have the process that comes by next be stuck."""
        scratch = self._folder / "next"
        scratch.write_text(way)
        scratch.rename(self._folder / place)

    def release(self, place: str) -> None:
        """Let it go on, and the process that comes by later."""
        (self._folder / place).unlink(missing_ok=True)
        try:
            os.close(os.open(self._folder / "fifo", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            # No one waits there.
            return
