"""Reassembles Python tracebacks from the lines of one process: chained, cut at either end, in any thread."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sglang_crashkit.model.event import Error
from sglang_crashkit.model.sample import Frame, short_path

HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "([^"]{1,600})", line (\d{1,9})(?:,? (?:in )?(.{1,300}))?')
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80})(?:\((?P<of>.{0,80})\))?(?:: (?P<text>.*)|:?)$"
)
#: Another program's message about an exception: ``… (ModuleNotFoundError: No module named …)``.
_IN_BRACKETS = re.compile(r"\(((?:\w{1,80}\.){0,12}\w{1,80}(?:Error|Exception)): (?P<text>[^()]{1,300})\)$")
#: The endings of exceptions' names.
_ENDINGS = ("Error", "Exception", "Warning", "Interrupt", "Exit", "Iteration", "Timeout", "Failure", "Empty", "Full")
#: A frame in the box that `rich` draws, and the box's own lines.
_BOXED_FRAME = re.compile(r"[│|] (\S{1,600}\.py):(\d{1,9}) in (\S{1,300})")
_BOX = "╭│╰"
#: The prefix of each line of an exception group, and the lines around each of its exceptions.
_GROUP = re.compile(r"\s*[|+](?:(?:-\+)?-{4,}.{0,60}|\s)\s?")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
#: Beginnings of log lines; lines of a message, such as a C++ exception's, begin differently.
_LOGGED = ("[20", "INFO", "WARNING", "ERROR", "Process ", "Exception in thread", "20", "$ ")
_MAX_FRAMES, _MAX_TEXT, _MAX_CHAIN, _MAX_TEXT_LINES, _MAX_CODE = 300, 4000, 8, 60, 160


#: A source line that is a call, or an assignment or return of its result.
_CALL = re.compile(r"(?:return |await |[\w., ]{1,80} = (?:await )?)?(?:\w{1,60}\.){0,6}(\w{1,80})\(")
#: Source lines that add nothing to the message: an import, a raise, marks, and the first line of a longer call.
_SAYS_NOTHING = re.compile(r"(?:import|from|raise)\b|[~^ ]*$|(?:\w+ = )?\w+\($")
#: A source line that reads an environment variable, whose name tells more than the frames.
_ENVIRONMENT = re.compile(r"\b(?:environ|getenv)\b.{0,8}[\"']\w")


@dataclass
class Traceback:
    """One traceback while its lines are read.

    Attributes:
        said: the line before it, which introduces it.
        errors: the complete exceptions of the chain, in the order of the text.
        is_flat: its lines have lost their indentation, as in a pasted page.
    """

    said: str = ""
    errors: list[Error] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    type: str = ""
    text: list[str] = field(default_factory=list)
    awaits_next: bool = False
    blank: int = 0
    is_flat: bool = False
    is_after_frame: bool = False
    is_group: bool = False  # a group of exceptions, each with a traceback
    is_cut: bool = False  # its head is missing
    is_remote: bool = False  # the original exception is printed last, as by Ray
    asserted: str = ""  # the innermost source line with an ``assert``
    called: str = ""  # the function that the source line of the last frame calls
    code: str = ""  # the source line of the last frame in SGLang, or a later one that reads the environment
    indent: int = 0  # of the last frame; source lines are indented further, the exception is not

    def take(self, line: str) -> bool:
        """Take a line; return whether the line belongs to the traceback."""
        if (self.frames or self.errors or self.is_group) and (match := _GROUP.match(line)):
            line = line[match.end() :]
        stripped = line.strip()
        if stripped[:1] == "│" and (inner := stripped.strip("│ ")) and self._is_framed(inner):
            # A pasted window of a terminal with its border.
            line, stripped = f"  {inner}" if inner.startswith("File") else inner, inner
        if stripped[:1] in _BOX and stripped and not self.type:
            if match := _BOXED_FRAME.match(stripped):
                self._add(match[1], match[2], match[3])
            return True
        if HEADER in line:
            if not (self.awaits_next or self.is_group) and (self.type or self.frames):
                return False
            self.is_group = self.is_group or "Exception Group " in line
            self._finish()
            self.awaits_next = False
            return True
        if stripped in _CHAINED:
            self._finish()
            self.awaits_next = True
            return True
        if self.awaits_next:
            return not stripped or stripped in _CHAINED
        if self.type.endswith("RayTaskError") and _FRAME.match(line):
            # The exception of another process that caused this one follows, with its own frames.
            self._finish()
            self.is_remote = True
        if not self.type:
            return self._take_frame(line, stripped)
        if not stripped:
            self.blank += 1
            return self.blank <= 2
        if line[:1] in " \t" or (len(self.text) < _MAX_TEXT_LINES and not self.blank and not line.startswith(_LOGGED)):
            self.blank = 0
            if len(self.text) < _MAX_TEXT_LINES:
                self.text.append(line)
            return True
        return False

    def _is_framed(self, inner: str) -> bool:
        if inner.startswith('File "'):
            return True
        match = _EXCEPTION.match(inner)
        return bool(self.frames and match and match[1].endswith(_ENDINGS) and not self.type)

    def _take_frame(self, line: str, stripped: str) -> bool:
        if match := _FRAME.match(line):
            self._add(match[1], match[2], match[3] or "<module>")
            self.is_flat = self.is_flat or line[:1] not in " \t"
            self.is_after_frame, self.indent, self.asserted, self.called = True, len(line) - len(line.lstrip()), "", ""
            self.code = "" if "sglang/" in match[1] else self.code
            return True
        match = _EXCEPTION.match(stripped)
        is_named = match is not None and match[1].endswith(_ENDINGS)
        is_moved = is_named and self.indent >= len(line) - len(line.lstrip())
        if not stripped.strip("^~ ") or (line[:1] in " \t" and (self.frames or not is_named) and not is_moved):
            # The source line of a frame, its marks, or "Previous line repeated".
            self.asserted = stripped if stripped.startswith("assert ") else self.asserted
            self.called = self.called or (match[1] if (match := _CALL.match(stripped)) else "")
            is_own = self.frames and "sglang/" in self.frames[-1].file and not _SAYS_NOTHING.match(stripped)
            if _ENVIRONMENT.search(stripped) or (is_own and not self.code):
                self.code = stripped[:_MAX_CODE].rstrip("( ,")
            return True
        if self.is_flat and self.is_after_frame and not is_named:
            self.is_after_frame = False
            return True
        if match:
            self.type, of_remote, first = match[1], match["of"], match["text"]
            if self.type.endswith("RayTaskError") and of_remote:
                first = f"({of_remote}) {first or ''}".rstrip()
            self.text = [first] if first else []
            return True
        return False

    def _add(self, path: str, line: str, function: str) -> None:
        if len(self.frames) < _MAX_FRAMES:
            self.frames.append(Frame(function.strip(), short_path(path), int(line)))

    def _finish(self) -> None:
        if self.type or self.frames:
            if not self.type and self.called and self.frames[-1].function != self.called:
                # It is cut off: the called function is the innermost frame that is known.
                self.frames.append(Frame(self.called, self.frames[-1].file, self.frames[-1].line))
            # For an assertion without a message, take its source line.
            said = self.text or ([self.asserted] if self.type == "AssertionError" else [])
            text = "\n".join(said).strip()[:_MAX_TEXT]
            error = Error(type=self.type, text=text, frames=tuple(reversed(self.frames)), code=self.code)
            self.errors = [*self.errors, error][-_MAX_CHAIN:]
        self.frames, self.type, self.text, self.blank, self.code = [], "", [], 0, ""

    def chain(self) -> tuple[Error, ...]:
        """Return the exceptions, the final one first; empty if no exception was understood."""
        if self.frames and not self.type and (found := bare_exception(self.said)):
            # Some loggers print the exception before its traceback.
            self.type, self.text = found[0], [found[1]]
        self._finish()
        return tuple(self.errors if self.is_remote else reversed(self.errors))


def begins(line: str) -> bool:
    """Return whether a line begins a traceback, or the rest of one without its head."""
    if HEADER in line or (line.startswith("╭") and HEADER[:-1] in line):
        return True
    return line.lstrip().startswith('File "') and _FRAME.match(line) is not None


def bare_exception(line: str) -> tuple[str, str] | None:
    """Return class and text of an exception that stands alone in a line, such as ``torch.OutOfMemoryError: CUDA …``."""
    match = _IN_BRACKETS.search(line.rstrip()[-400:]) or _EXCEPTION.match(line.strip())
    is_word = match is not None and match[1] in _ENDINGS and match[1] != "Exception"  # "Error: …", as shells print it
    if match is None or not match["text"] or is_word or not match[1].endswith(_ENDINGS):
        return None
    return match[1], match["text"]
