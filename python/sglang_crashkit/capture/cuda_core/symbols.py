"""Whose function an address of the GPU is.

A core holds the cubin of every module that was loaded, relocated: an ELF file whose sections say where they lie on the
GPU. A function's symbol gives its place in its section, and so an address its function. That is an inference: nothing
in the core itself names a kernel.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_crashkit.capture.cuda_core.core_file import CudaCoreError, ElfPart, Kind, Section

#: The largest cubins of today hold some ten thousand.
MAX_SYMBOLS = 200_000
MAX_PROBLEMS = 10
_SYMBOL = struct.Struct("<IBBHQQ")
_TEXT = ".text."
_FUNCTION = 2


@dataclass(frozen=True)
class Function:
    """A function that an address lies in."""

    start: int  # its address
    size: int  # how long it is, in bytes
    name: str  # as the compiler has it, not demangled


@dataclass
class _Image:
    """A cubin and where its sections lie, by address."""

    part: ElfPart
    loaded: list[Section]
    functions: list[Function] | None = None

    def section_at(self, address: int) -> Section | None:
        position = bisect_right(self.loaded, address, key=lambda section: section.address) - 1
        # Sections of a broken image may overlap; that of the nearest beginning counts.
        section = self.loaded[position] if position >= 0 else None
        return section if section is not None and address < section.address + section.size else None

    def function_at(self, address: int) -> Function | None:
        functions = self.functions or []
        position = bisect_right(functions, address, key=lambda function: function.start) - 1
        function = functions[position] if position >= 0 else None
        return function if function and function.name and address < function.start + max(1, function.size) else None


class Symbols:
    """The functions of all cubins in a core, the `images`; `problems` says why some could not be used."""

    def __init__(self, core: ElfPart, images: Iterable[Section]) -> None:
        self.problems: list[str] = []
        self._source = core.source
        self._known: dict[int, Function | None] = {}
        self._images: list[_Image] = []
        for section in images:
            try:
                what = f"the cubin in section {section.index}"
                part = ElfPart(core.source, section.offset, section.size, what)
                loaded = [found for found in part.sections(loaded=True) if found.size]
                self._images.append(_Image(part, sorted(loaded, key=lambda found: found.address)))
            except CudaCoreError as error:
                self._note(error)

    def at(self, address: int) -> Function | None:
        """Return the function that `address` lies in, None where no cubin has one there."""
        if address not in self._known:
            try:
                self._known[address] = self._find(address)
            except CudaCoreError as error:
                self._known[address] = None
                self._note(error)
        return self._known[address]

    def _find(self, address: int) -> Function | None:
        for image in self._images:
            # Many addresses in many cubins take their time, too.
            self._source.spend()
            section = image.section_at(address)
            if section is None:
                continue
            if image.functions is None:
                # Once, whatever comes of it.
                image.functions = []
                try:
                    image.functions = _functions_of(image.part)
                except CudaCoreError as error:
                    self._note(error)
            return image.function_at(address) or _named_by_section(image.part, section)
        return None

    def _note(self, error: CudaCoreError) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(error.message)


def _functions_of(part: ElfPart) -> list[Function]:
    """Return the functions of a cubin by address."""
    found = []
    loaded = {section.index: section for section in part.sections(loaded=True)}
    for table in part.sections((Kind.SYMTAB,)):
        count = table.size // _SYMBOL.size
        if table.is_compressed or count > MAX_SYMBOLS:
            raise part.source.error(f"the symbol table of a cubin is packed, or has {count} symbols")
        names = part.section(table.link)
        data = part.read(table.offset, count * _SYMBOL.size, "the symbol table of a cubin")
        for name, info, _, index, value, size in _SYMBOL.iter_unpack(data):
            section = loaded.get(index)
            if info & 0xF == _FUNCTION and section is not None:
                # Of some linkers it is the address already, and not the place in the section.
                start = value if value >= section.address else section.address + value
                found.append(Function(start, size, part.string(names, name)))
    return sorted(found, key=lambda function: (function.start, function.size))


def _named_by_section(part: ElfPart, section: Section) -> Function | None:
    """Return the kernel that has a section of its own, as nvcc gives each one."""
    name = part.name_of(section)
    if not name.startswith(_TEXT) or len(name) == len(_TEXT):
        return None
    return Function(section.address, section.size, name.removeprefix(_TEXT))
