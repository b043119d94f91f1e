"""The requests of an incident, as they can be sent again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError, NothingToDoError
from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.request_fingerprint import redacted_in
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.incident.summary import mapping_of
from sglang_crashkit.kernel.private_files import open_regular
from sglang_crashkit.redact import REDACTED

#: What stands in a journal's line beside the request itself, or concerns the server that took it.
_NOT_SENT = frozenset(
    {
        *("kind", "state", "arrived", "ended", "aborted", "pid", "omitted", "truncated", "is_single", "batch_size"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "http_worker_ipc", "lora_id"),
        *("received_time", "received_time_perf", "validation_time", "external_trace_header", "time_stats"),
        *("parallel_sample_num", "need_wait_for_image", "need_wait_for_mm_inputs", "num_items_assigned"),
    }
)
#: Words that a line has for numbers where JSON has none, in these parameters.
_NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
_NUMBERS = frozenset(
    {
        *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        "logit_bias",
    }
)
_MAX_LINE = 64 << 20


@dataclass(frozen=True)
class StoredRequest:
    """A request of an incident."""

    rid: str  # its id
    arrived: float  # when it arrived, in seconds since the epoch; 0 where that is not known
    was_running: bool  # it had not been answered when the server failed
    body: Mapping[str, Any]  # what is sent
    lacks: tuple[str, ...] = ()  # what was not kept of it, a phrase each
    path: str = "/generate"  # where it is sent
    #: The ids of the requests that SGLang made of it, beside `rid`, where it wants several answers (``n``).
    others: tuple[str, ...] = ()

    @property
    def rids(self) -> tuple[str, ...]:
        """All ids by which the incident knows it."""
        return (self.rid, *self.others)

    @property
    def is_complete(self) -> bool:
        """Whether it can be sent as it came."""
        return not self.lacks and ("text" in self.body or "input_ids" in self.body)


def read_requests(incident: StoredIncident) -> list[StoredRequest]:
    """Return the requests of an incident in the order in which they arrived.

    Raises:
        NothingToDoError: it holds none.
        CrashkitError: they cannot be read.
    """
    path, found = incident.path / REQUESTS, dict[str, StoredRequest]()
    try:
        for number, one in enumerate(_lines_of(path) if path.is_file() else ()):
            # SGLang makes several of one that wants several answers, each with the whole body.
            several = mapping_of(one.body.get("sampling_params")).get("n") not in (None, 1)
            key = json.dumps({**one.body, "rid": one.path}, sort_keys=True) if several else str(number)
            known = found.get(key)
            found[key] = replace(known, others=(*known.others, one.rid)) if known is not None else one
    except OSError as error:
        raise CrashkitError(f"the requests of {incident.path} cannot be read: {error}") from error
    if not found:
        raise NothingToDoError(
            f"{incident.path} holds no requests",
            next_step=f"sglang-crashkit show {shlex.quote(str(incident.path))} --requests   # says why",
        )
    return sorted(found.values(), key=lambda one: one.arrived)


def _lines_of(path: Path) -> Iterator[StoredRequest]:
    with open_regular(path, follow=True) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE), b""), 1):
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                # As a full disk leaves it.
                yield StoredRequest(f"line {number}", 0.0, False, {}, ("all of it, as the line is broken,",))
                continue
            lacks = [f"its {name} ({text})" for name, text in mapping_of(fields.get("omitted")).items()]
            lacks += [f"the middle of its {name}" for name in mapping_of(fields.get("truncated"))]
            lacks += [f"its {name}, as it may be a secret," for name in redacted_in(fields)]
            # With the journal's flag for prompts off there may be neither text nor ids.
            if not lacks and fields.get("text") is None and fields.get("input_ids") is None:
                lacks.append("its prompt")
            try:
                arrived = datetime.fromisoformat(str(fields.get("arrived")).replace("Z", "+00:00")).timestamp()
            except ValueError:
                arrived = 0.0
            path_sent = "/encode" if fields.get("kind") == "EmbeddingReqInput" else "/generate"
            was_running = fields.get("state") == "unfinished"
            yield StoredRequest(str(fields.get("rid")), arrived, was_running, _body(fields), tuple(lacks), path_sent)


def _body(fields: Mapping[str, Any]) -> dict[str, Any]:
    body = {name: _kept(value) for name, value in fields.items() if name not in _NOT_SENT}
    body = {name: value for name, value in body.items() if value not in (None, REDACTED)}
    if isinstance(sampling := body.get("sampling_params"), dict):
        numbers = {name: _number(value) for name, value in sampling.items() if name in _NUMBERS}
        body["sampling_params"] = sampling | numbers
    return body


def _kept(value: Any) -> Any:
    return {name: _kept(one) for name, one in value.items() if one != REDACTED} if isinstance(value, dict) else value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(one) for name, one in value.items()}
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value
