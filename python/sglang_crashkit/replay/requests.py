"""The requests of an incident, as they can be sent again: from the journal's lines, or from upstream's pickle."""

from __future__ import annotations

import io
import json
import pickle
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from sglang_crashkit.errors import CrashkitError, NothingToDoError
from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.request_fingerprint import redacted_in
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.incident.summary import mapping_of
from sglang_crashkit.redact import REDACTED

#: What stands in a journal's line beside the request itself.
_ABOUT = frozenset({"kind", "state", "arrived", "ended", "aborted", "pid", "omitted", "truncated"})
#: What concerns the server that took it, and is nothing to ask another one.
_OF_THAT_SERVER = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "http_worker_ipc", "lora_id"),
        *(
            "received_time",
            "received_time_perf",
            "validation_time",
            "external_trace_header",
            "time_stats",
            "is_single",
            "batch_size",
        ),
        *("parallel_sample_num", "need_wait_for_image", "need_wait_for_mm_inputs", "num_items_assigned"),
    }
)
#: Numbers, for which a line has a word where JSON has none.
_NUMBERS = frozenset(
    {
        *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        "logit_bias",
    }
)
_NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
_MAX_LINE = 64 << 20
_SAFE = {("collections", "deque"), ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset")}


@dataclass(frozen=True)
class StoredRequest:
    """A request of an incident."""

    rid: str  # its id
    arrived: float  # when it arrived, in seconds since the epoch; 0 where that is not known
    was_running: bool  # it had not been answered when the server failed
    body: Mapping[str, Any]  # what is sent
    lacks: tuple[str, ...] = ()  # what was not kept of it, a phrase each
    path: str = "/generate"  # where it is sent
    was_given_up: bool = False  # somebody aborted it before it was answered, as a client does that goes
    #: The ids of the requests that SGLang made of it, beside `rid`: one for each of the answers (``n``) that it wants.
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
    path = incident.path / REQUESTS
    pickled = mapping_of((incident.document or {}).get("requests")).get("path")
    try:
        if path.is_file():
            found = list(_of_journal(path))
        elif isinstance(pickled, str) and Path(pickled).is_file():
            found = list(_of_pickle(Path(pickled)))
        else:
            found = []
    except OSError as error:
        raise CrashkitError(f"the requests of {incident.path} cannot be read: {error}") from error
    if not found:
        raise NothingToDoError(
            f"{incident.path} holds no requests",
            next_step=f"sglang-crashkit show {shlex.quote(str(incident.path))} --requests   # says why",
        )
    return sorted(_as_asked(found), key=lambda one: one.arrived)


def _as_asked(found: Iterable[StoredRequest]) -> Iterator[StoredRequest]:
    """Yield requests as clients sent them: SGLang makes several of one that wants several answers.

    Each of these has the whole body, with the number of answers. So have as many that it makes first, and one that
    warms the cache up (``TokenizerManager._handle_batch_request``); those are left out where others are under way.
    """
    parts: dict[str, list[StoredRequest]] = {}
    for one in found:
        if _answers_wanted(one.body) > 1:
            alike = {name: value for name, value in one.body.items() if name != "rid"}
            parts.setdefault(json.dumps([one.path, alike], sort_keys=True), []).append(one)
        else:
            yield one
    for some in parts.values():
        wanted, running = _answers_wanted(some[0].body), [one for one in some if one.was_running]
        made, size = (running, wanted + 1) if running else (some, 2 * wanted + 1)
        for begin in range(0, len(made), size):
            first, *rest = made[begin : begin + size]
            yield replace(first, others=tuple(one.rid for one in rest))


def _answers_wanted(body: Mapping[str, Any]) -> int:
    number = mapping_of(body.get("sampling_params")).get("n")
    return number if type(number) is int else 1


def _of_journal(path: Path) -> Iterator[StoredRequest]:
    with path.open("rb") as lines:
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
            arrived = _seconds(fields.get("arrived"))
            was_running, way = fields.get("state") == "unfinished", _path_of(fields.get("kind"))
            was_given_up = bool(fields.get("aborted"))
            yield StoredRequest(
                str(fields.get("rid")), arrived, was_running, _body(fields), tuple(lacks), way, was_given_up
            )


def _path_of(kind: object) -> str:
    return "/encode" if kind == "EmbeddingReqInput" else "/generate"


def _seconds(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _body(fields: Mapping[str, Any]) -> dict[str, Any]:
    body = {
        name: _kept(value)
        for name, value in fields.items()
        if value not in (None, REDACTED) and name not in _ABOUT and name not in _OF_THAT_SERVER
    }
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        body["sampling_params"] = {
            name: _number(value) if name in _NUMBERS else value for name, value in sampling.items()
        }
    return body


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _kept(one) for name, one in value.items() if one != REDACTED}
    return value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(one) for name, one in value.items()}
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


# -- upstream's pickle


class _Stand:
    """Stands for an object of any class: its fields are kept, and no code of its class is run."""

    def __init__(self, *_arguments: object, **_named: object) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple):
            state = next((part for part in state if isinstance(part, dict)), {})
        self.fields = state if isinstance(state, dict) else {}


def _rebuild(_kind: object, fields: object) -> _Stand:
    stand = _Stand()
    stand.__setstate__(fields)
    return stand


class _Reader(pickle.Unpickler):
    """Reads plain data, and stands in for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _SAFE:
            return super().find_class(module, name)
        # msgspec makes its objects by a function.
        return _rebuild if (module, name) == ("msgspec._utils", "rebuild") else type("_Stand", (_Stand,), {})

    def persistent_load(self, _name: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of itself")


def _of_pickle(path: Path) -> Iterator[StoredRequest]:
    """Yield the requests of a ``crash_dump_*.pkl``; see ``TokenizerManager.dump_requests_before_crash``."""
    try:
        whole = _Reader(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # noqa: BLE001 - a pickle may bring up any error
        raise CrashkitError(f"{path} is no crash dump that can be read: {error}") from None
    for entry in mapping_of(whole).get("requests") or ():
        if not isinstance(entry, (tuple, list)) or len(entry) < 4 or not isinstance(entry[0], _Stand):
            continue
        asked, answered, created = entry[0].fields, mapping_of(entry[1]), entry[2]
        plain = {name: value for name, value in asked.items() if _is_plain(value)}
        lacks = [f"its {name}" for name in asked.keys() - plain.keys() if name not in _OF_THAT_SERVER]
        if not lacks and plain.get("text") is None and plain.get("input_ids") is None:
            lacks.append("its prompt, as text or token ids,")
        meta = mapping_of(answered.get("meta_info"))
        arrived = float(created) if isinstance(created, (int, float)) else 0.0
        yield StoredRequest(
            str(plain.get("rid")), arrived, meta.get("finish_reason") is None, _body(plain), tuple(lacks)
        )


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(its) for key, its in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))
