"""The requests of an incident, in a form to send again, and their fingerprints, which identify repeated requests.

SGLang fills in the defaults of a request before the journal records it. So a fingerprint leaves out values that mean
"not given", and fields that only the server uses, such as the request's id.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError, NothingToDoError
from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.kernel.private_files import open_regular
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.model.lenient import mapping_of, seconds_of
from sglang_crashkit.redact import REDACTED

#: Fields of a journal's line that are not of the request itself, or that concern the server which received it.
_NOT_SENT = frozenset(
    {
        *("kind", "state", "arrived", "ended", "aborted", "pid", "omitted", "truncated", "is_single", "batch_size"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "http_worker_ipc", "lora_id"),
        *("received_time", "received_time_perf", "validation_time", "external_trace_header", "time_stats"),
        *("parallel_sample_num", "need_wait_for_image", "need_wait_for_mm_inputs", "num_items_assigned"),
    }
)
#: Words for numbers that JSON cannot express, and the parameters in which a journal's line has such words.
_NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
_NUMBERS = frozenset(
    {
        *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        "logit_bias",
    }
)
#: Parameters that an answer depends on besides the prompt.
_PARAMETERS = (
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
    *("return_indexer_topk", "return_entropy", "return_prompt_token_ids", "return_sampling_mask"),
    *("sampling_logprobs_mode", "return_pooled_hidden_states", "session_params", "lora_path", "extra_key"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"),
    *("dimensions", "is_cross_encoder_request", "require_reasoning", "max_thinking_tokens"),
    *("custom_logit_processor", "multi_item_delimiter_indices", "token_indices_to_pool"),
)
#: Fields of a prompt, or that an answer depends on, which an incident does not keep.
_NOT_KEPT = (
    *("omitted", "truncated", "image_data", "audio_data", "video_data", "input_embeds", "video_config"),
    *("positional_embed_overrides", "embed_overrides", "watermark"),
)
#: The default of this parameter is -1, so that 0 counts as given.
_START = "logprob_start_len"
_MAX_LINE = 64 << 20


@dataclass(frozen=True)
class StoredRequest:
    """A request of an incident."""

    rid: str  # its id
    arrived: float  # when it arrived, in seconds since the epoch; 0 if that is not known
    was_running: bool  # it had not been answered when the server failed
    body: Mapping[str, Any]  # the JSON body to send
    lacks: tuple[str, ...] = ()  # the parts that the incident did not keep, a phrase each
    path: str = "/generate"  # the path of the URL to send it to
    others: tuple[str, ...] = ()  # ids of the other requests into which SGLang split it for several answers (``n``)

    @property
    def rids(self) -> tuple[str, ...]:
        """All ids of this request in the incident."""
        return (self.rid, *self.others)

    @property
    def is_complete(self) -> bool:
        """Whether it can be sent in full, as it arrived."""
        return not self.lacks and ("text" in self.body or "input_ids" in self.body)


def read_requests(incident: StoredIncident) -> list[StoredRequest]:
    """Return the requests of an incident in the order in which they arrived.

    Raises NothingToDoError where it holds none, CrashkitError where they cannot be read.
    """
    path, found = incident.path / REQUESTS, dict[str, StoredRequest]()
    try:
        for number, one in enumerate(_lines_of(path) if path.is_file() else ()):
            # SGLang splits a request for several answers into several, each with the whole body.
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
                # A line that is cut off, for example because the disk was full.
                yield StoredRequest(f"line {number}", 0.0, False, {}, ("all of it, as the line is broken,",))
                continue
            lacks = [f"its {name} ({text})" for name, text in mapping_of(fields.get("omitted")).items()]
            lacks += [f"the middle of its {name}" for name in mapping_of(fields.get("truncated"))]
            lacks += [f"its {name}, as it may be a secret," for name in redacted_in(fields)]
            # If prompts are not to be recorded, a line may have neither text nor token ids.
            if not lacks and fields.get("text") is None and fields.get("input_ids") is None:
                lacks.append("its prompt")
            arrived = seconds_of(fields.get("arrived")) or 0.0
            path_sent = "/encode" if fields.get("kind") == "EmbeddingReqInput" else "/generate"
            was_running = fields.get("state") == "unfinished"
            body = {name: value for name, value in _kept(fields).items() if name not in _NOT_SENT and value is not None}
            yield StoredRequest(str(fields.get("rid")), arrived, was_running, body, tuple(lacks), path_sent)


def _kept(value: Any, *, is_number: bool = False) -> Any:
    """Return a value without redacted fields, and with numbers in place of the words for numbers."""
    if isinstance(value, dict):
        inner = {name: one for name, one in value.items() if one != REDACTED}
        return {name: _kept(one, is_number=is_number or name in _NUMBERS) for name, one in inner.items()}
    return float(value) if is_number and isinstance(value, str) and value in _NOT_FINITE else value


def fingerprint_of(fields: Mapping[str, Any]) -> str:
    """Return the fingerprint of a line of ``requests/requests.jsonl``; empty if a part of the request was not kept."""
    asked, prompt = _set_in(fields), _prompt_of(fields)
    if not prompt or any(map(fields.get, _NOT_KEPT)) or any(redacted_in(asked)):
        return ""
    return hashlib.sha256(prompt + json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def parameters_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request besides its prompt, by name; dotted names for those in ``sampling_params``."""
    asked = _set_in(fields)
    sampling = asked.pop("sampling_params", None)
    inner = sampling if isinstance(sampling, dict) else {}
    return {f"sampling_params.{name}": value for name, value in inner.items()} | asked


def redacted_in(value: object, name: str = "") -> Iterator[str]:
    """Yield the dotted names of the values in a mapping that an incident does not keep as they may be secrets."""
    if isinstance(value, Mapping):
        for its, one in value.items():
            yield from redacted_in(one, f"{name}.{its}" if name else str(its))
    elif value == REDACTED:
        yield name


def _set_in(fields: Mapping[str, Any]) -> dict[str, Any]:
    asked = {name: fields[name] for name in _PARAMETERS if fields.get(name)}
    if fields.get(_START) not in (None, -1):
        asked[_START] = fields[_START]
    else:
        asked.pop(_START, None)
    sampling = asked.pop("sampling_params", None)
    if isinstance(sampling, dict):
        sampling = {name: value for name, value in sampling.items() if value is not None}
    return asked | ({"sampling_params": sampling} if sampling else {})


def _prompt_of(fields: Mapping[str, Any]) -> bytes:
    """Return ``text`` or ``ids`` and a hash of the request's text or token ids; empty if it has neither."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if isinstance(text, str):
        return b"text" + hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    if text is None and isinstance(ids, (list, tuple)):
        try:
            return b"ids" + hashlib.sha256(array("q", ids).tobytes()).digest()
        except (TypeError, OverflowError):
            # The list does not hold token ids.
            return b""
    return b""


def was_aborted_before(fields: Mapping[str, Any], incident: Incident) -> bool:
    """Return whether a request, by its line of ``requests/requests.jsonl``, was aborted before anything failed.

    An abort after a hang or the failed rank's last step began does not count: the client gave up waiting, and the rank,
    which has read nothing since, never saw the abort. If it is not known when a hang began, no abort counts.
    """
    aborted = seconds_of(fields.get("aborted"))
    if aborted is None:
        return False
    first, is_known = incident.first_failure, incident.verdict is None or incident.verdict.kind != "hang"
    began = [seconds_of(incident.trigger.time)]
    if first is not None and first.in_step is not None:
        began.append(seconds_of(first.in_step.began))
    for event in incident.timeline:
        if event.seconds is not None and event.silent_secs is not None:
            began.append(event.seconds - event.silent_secs)
            is_known = True
        elif first is not None and event.pid == first.pid:
            began.append(event.seconds)
    known = [one for one in began if one is not None]
    return is_known and bool(known) and aborted < min(known)
