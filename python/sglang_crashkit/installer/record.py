"""RECORD, the list of an installation's files: rows that do not change keep every byte."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Mapping, Sequence

from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.patches import split_lines

_HASH_AND_SIZE = re.compile(r",sha256=[\w-]+,\d+(?=\r?\n?$)")


def format_row(path: str, data: bytes | None, *, end: str = "\n") -> str:
    """Return one row with the hash and size of `data`, or without both if it is None."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([path])
    return f"{text.getvalue()}{_hash_and_size(data)}{end}"


def read_rows(record: bytes, *, source: str) -> list[tuple[str, str]]:
    """Return (path, line) of each row; the lines joined are the record; raises RefusedError where it is malformed."""
    try:
        lines = [line.decode() for line in split_lines(record)]
        return [(next(csv.reader([line], strict=True))[0], line) for line in lines]
    except (UnicodeDecodeError, csv.Error, IndexError) as error:
        raise RefusedError(f"{source} does not read as a RECORD: {error}") from error


def rewrite_record(record: bytes, contents: Mapping[str, bytes | None], own: Sequence[str], *, source: str) -> bytes:
    """Return a RECORD with the hashes and sizes of other contents; raises what `read_rows` does.

    Args:
        record: the bytes of the RECORD.
        contents: path → bytes, None for a row without hash and size. A row of upstream's without a hash stays without
            one, and upstream's file without a row gets none.
        own: the paths of the kit's own files. Those with contents get rows ahead of all others, so that the last row
            keeps its line end, or the lack of one; the rows of the others are removed.
        source: the name of the RECORD, for errors.
    """
    rows = read_rows(record, source=source)
    end = "\r\n" if rows and rows[0][1].endswith("\r\n") else "\n"
    lines = [format_row(path, contents[path], end=end) for path in own if path in contents]
    for path, line in rows:
        if path not in own:
            lines.append(_HASH_AND_SIZE.sub(_hash_and_size(contents[path]), line) if path in contents else line)
    return "".join(lines).encode()


def _hash_and_size(data: bytes | None) -> str:
    if data is None:
        return ",,"
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f",sha256={digest},{len(data)}"
