"""Python tracebacks in the lines of one process, put together again: chained, cut at either end, in any thread."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sglang_crashkit.model.event import Error
from sglang_crashkit.model.sample import Frame, short_path

HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "([^"]{1,600})", line (\d{1,9})(?:, in (.{1,300}))?')
_EXCEPTION = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80})(?:\(.{0,80}\))?(?:: (.*)|:?)$")
#: Names of exceptions that end in another way, as far as the field has them.
_ENDINGS = ("Error", "Exception", "Warning", "Interrupt", "Exit", "Iteration", "Timeout", "Failure", "Empty", "Full")
_GROUP = re.compile(r"\s*[|+](?:-{4,}.{0,60}|\s)\s?")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_MAX_FRAMES, _MAX_TEXT, _MAX_CHAIN, _MAX_TEXT_LINES = 300, 4000, 8, 60


@dataclass
class Traceback:
    """One traceback while its lines are read.

    Attributes:
        said: the line that introduced it.
        errors: those of the chain that are whole, the one that came first at the front.
    """

    said: str = ""
    errors: list[Error] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    type: str = ""
    text: list[str] = field(default_factory=list)
    awaits_next: bool = False
    blank: int = 0

    def take(self, line: str) -> bool:
        """Take a line into it; return whether the line belongs to it."""
        if (match := _GROUP.match(line)) and line.lstrip()[:1] in "|+" and (self.frames or self.errors):
            line = line[match.end() :]
        stripped = line.strip()
        if HEADER in line:
            if not self.awaits_next and (self.type or self.frames):
                return False
            self._finish()
            self.awaits_next = False
            return True
        if stripped in _CHAINED:
            self._finish()
            self.awaits_next = True
            return True
        if self.awaits_next:
            return not stripped or stripped in _CHAINED
        if not self.type:
            return self._take_frame(line, stripped)
        if not stripped:
            self.blank += 1
            return self.blank <= 2
        if line[:1] in " \t" or (len(self.text) < _MAX_TEXT_LINES and not self.blank and _is_text(line)):
            self.blank = 0
            if len(self.text) < _MAX_TEXT_LINES:
                self.text.append(line)
            return True
        return False

    def _take_frame(self, line: str, stripped: str) -> bool:
        if match := _FRAME.match(line):
            if len(self.frames) < _MAX_FRAMES:
                self.frames.append(Frame((match[3] or "<module>").strip(), short_path(match[1]), int(match[2])))
            return True
        if not stripped or (line[:1] in " \t" and self.frames):
            # The source line of a frame, its marks, or "Previous line repeated".
            return True
        if match := _EXCEPTION.match(stripped):
            self.type, first = match[1], match[2]
            self.text = [first] if first else []
            return True
        return False

    def _finish(self) -> None:
        if self.type or self.frames:
            text = "\n".join(self.text).strip()[:_MAX_TEXT]
            self.errors = [*self.errors, Error(type=self.type, text=text, frames=tuple(reversed(self.frames)))]
            self.errors = self.errors[-_MAX_CHAIN:]
        self.frames, self.type, self.text, self.blank = [], "", [], 0

    def chain(self) -> tuple[Error, ...]:
        """Return the exceptions, the one that arrived first; empty where nothing was understood."""
        self._finish()
        return tuple(reversed(self.errors))


def begins(line: str) -> bool:
    """Return whether a line begins a traceback, also one whose head is cut off."""
    return HEADER in line or (line.lstrip().startswith('File "') and _FRAME.match(line) is not None)


def bare_exception(line: str) -> tuple[str, str] | None:
    """Return class and text of an exception that stands alone in a line, such as ``torch.OutOfMemoryError: CUDA …``."""
    match = _EXCEPTION.match(line.strip())
    if match is None or not match[2] or not match[1].endswith(_ENDINGS):
        return None
    return match[1], match[2]


def _is_text(line: str) -> bool:
    # The message goes on, as those of C++ do; a line of a log does not.
    return not line.startswith(("[20", "INFO", "WARNING", "ERROR", "Process ", "Exception in thread", "20", "$ "))
