"""A model of RECORD that keeps every row it does not touch byte for byte."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_crashkit.errors import RefusedError


@dataclass(frozen=True)
class Row:
    """One row."""

    #: Relative to the folder that holds the dist-info folder, with forward slashes.
    path: str
    #: The line as it stands, with its line end.
    raw: str


@dataclass(frozen=True)
class Record:
    """The rows of a RECORD, in their order."""

    rows: tuple[Row, ...]

    @classmethod
    def parse(cls, data: bytes, *, source: str) -> Record:
        """Read a RECORD.

        Raises:
            RefusedError: it is not one.
        """
        try:
            lines = io.StringIO(data.decode("utf-8"), newline="\n").readlines()
            rows = [Row(_fields(line)[0], line) for line in lines]
        except (UnicodeDecodeError, csv.Error, IndexError) as error:
            raise RefusedError(f"{source} does not read as a RECORD: {error}") from error
        return cls(tuple(rows))

    def find(self, path: str) -> str | None:
        """Return the raw row of `path`, if there is one."""
        return next((row.raw for row in self.rows if row.path == path), None)

    def with_rows(self, changes: Mapping[str, str | None]) -> Record:
        """Return the record with other rows.

        Args:
            changes: path → its raw row, or None to take the row out. A row that is there is
                rewritten in place; a new one goes ahead of all others, so that the last row keeps
                its line end, or the lack of it.
        """
        kept = [Row(row.path, changes[row.path] or "") if row.path in changes else row for row in self.rows]
        present = {row.path for row in self.rows}
        added = [Row(path, raw) for path, raw in changes.items() if raw and path not in present]
        return Record((*added, *(row for row in kept if row.raw)))

    def format_row(self, path: str, data: bytes | None) -> str:
        """Return the row of the file at `path`.

        Args:
            path: as in `Row.path`.
            data: its bytes, None for a row without hash and size.
        """
        existing = self.find(path)
        model = existing if existing is not None else self.rows[0].raw if self.rows else "\n"
        body = model.rstrip("\r\n")
        end = model[len(body) :]
        if existing is None:
            end = end or "\n"
        return format_row(path, data, end=end)

    def to_bytes(self) -> bytes:
        """Return the record as a file's bytes."""
        return "".join(row.raw for row in self.rows).encode()


def format_row(path: str, data: bytes | None, *, end: str = "\n") -> str:
    """Return one row with the hash and size of `data`, or without both if it is None."""
    fields = [path, "", ""]
    if data is not None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        fields = [path, f"sha256={digest}", str(len(data))]
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerow(fields)
    return text.getvalue()


def _fields(line: str) -> list[str]:
    return next(csv.reader([line], strict=True))
