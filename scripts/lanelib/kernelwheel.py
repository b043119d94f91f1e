"""Take out of SGLang's kernel wheel what one kind of GPU does not load.

The wheel holds the same kernels for two generations of GPUs, and FlashAttention for all: 1.1 GB, of which a server on
one GPU with Triton's attention loads the 20 MB of ``common_ops``. Its ``load_utils`` takes ``sm90`` where the compute
capability is 9.0 and ``sm100`` for every other. Sources: the wheel itself; the binary distribution format,
https://packaging.python.org/en/latest/specifications/binary-distribution-format/.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from pathlib import Path
from typing import Literal

from lanelib.errors import LaneError

Generation = Literal["sm90", "sm100"]

#: Loaded when another attention backend than Triton's asks for them, or where several GPUs talk by MSCCL++.
_UNUSED = re.compile(r"sgl_kernel/flash(mla)?_ops\.[^/]+|_mscclpp\.[^/]+|lib/[^/]*mscclpp[^/]*")
_COMMON = re.compile(r"sgl_kernel/(sm\d+)/.+")


def generation_of(compute_capability: tuple[int, int]) -> Generation:
    """Return which libraries the wheel loads on a GPU of this compute capability."""
    return "sm90" if compute_capability == (9, 0) else "sm100"


def strip_kernels(wheel: Path, generation: Generation) -> int:
    """Replace `wheel` by one with the libraries of one generation of GPUs only.

    Args:
        wheel: the wheel of ``sglang-kernel``.
        generation: which libraries stay.

    Returns:
        The bytes that it is smaller by, compressed.

    Raises:
        LaneError: it is no wheel, or has no libraries of this generation.
    """
    before = wheel.stat().st_size
    fresh = wheel.with_suffix(".new")
    try:
        with zipfile.ZipFile(wheel) as source:
            kept = [info for info in source.infolist() if _is_kept(info.filename, generation)]
            if not any(info.filename.startswith(f"sgl_kernel/{generation}/") for info in kept):
                raise LaneError(f"{wheel.name} has no kernels for {generation}", next_step="name another release")
            names = {info.filename for info in kept}
            with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as target:
                for info in kept:
                    content = source.read(info)
                    if info.filename.endswith(".dist-info/RECORD"):
                        content = _rows_of(content, names)
                    target.writestr(info, content, zipfile.ZIP_DEFLATED)
        fresh.replace(wheel)
    except zipfile.BadZipFile as error:
        raise LaneError(f"{wheel} is no wheel: {error}", next_step="delete it, and repeat") from error
    finally:
        fresh.unlink(missing_ok=True)
    return before - wheel.stat().st_size


def _is_kept(name: str, generation: Generation) -> bool:
    library = _COMMON.fullmatch(name)
    return not _UNUSED.fullmatch(name) and (library is None or library[1] == generation)


def _rows_of(record: bytes, names: set[str]) -> bytes:
    """Return RECORD with the rows of files that are there only."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(row for row in csv.reader(record.decode().splitlines()) if row and row[0] in names)
    return text.getvalue().encode()
