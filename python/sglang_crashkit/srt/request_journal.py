"""Note the requests of a tokenizer manager in its journal as they come and go.

All of SGLang's releases keep the requests under way in one dictionary, ``TokenizerManager.rid_to_state``: whatever
enters or leaves it was begun or has ended. A dictionary that notes this stands in for it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_crashkit.core.disk import why_no_room
from sglang_crashkit.core.journal import JournalWriter
from sglang_crashkit.core.journal_place import new_ring
from sglang_crashkit.core.redact import REDACTED, is_secret_name
from sglang_crashkit.core.request_record import describe
from sglang_crashkit.core.settings import JOURNAL_VARIABLE, Settings

logger = logging.getLogger(__name__)

#: Fields of a request that are kept beside its prompt: what the answer depends on, and where it was sent.
_KEPT = frozenset(
    (  # noqa: SIM905 - as a list it would be fifty lines
        "rid sampling_params stream return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
        "return_text_in_logprobs return_hidden_states return_routed_experts routed_experts_start_len "
        "return_indexer_topk return_entropy return_prompt_token_ids return_sampling_mask sampling_logprobs_mode "
        "return_bytes log_metrics modalities session_id session_params conversation_id lora_path dimensions "
        "is_cross_encoder_request bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size "
        "data_parallel_rank routed_dp_rank disagg_prefill_dp_rank routing_key extra_key priority background "
        "require_reasoning max_thinking_tokens no_logs max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
        "video_max_dynamic_patch use_audio_in_video return_pooled_hidden_states"
    ).split()
)
#: What the server itself adds, of no use to anybody else.
_INTERNAL = frozenset(
    (  # noqa: SIM905 - as above
        "text input_ids is_single batch_size parallel_sample_num http_worker_ipc lora_id received_time "
        "validation_time external_trace_header need_wait_for_image need_wait_for_mm_inputs num_items_assigned "
        "encoder_urls"
    ).split()
)
_WITHHELD = "withheld: the request asks for no logs"

_is_secret_name = functools.lru_cache(maxsize=1024)(is_secret_name)


def open_journal() -> JournalWriter | None:
    """Return a journal for the requests of this process; None where none is wanted, or the disk is too full for one.

    Raises:
        RingError: its space cannot be reserved.
    """
    settings, folder = Settings.from_environ(), os.environ.get(JOURNAL_VARIABLE)
    if not settings.enabled or not settings.journal or not folder:
        return None
    size = int(settings.journal_mb * 2**20)
    problem = why_no_room(Path(folder), size, settings.disk)
    if problem:
        logger.warning(
            "crash kit: no request journal of %g MiB in %s: %s; next: make room there, or set "
            "SGLANG_CRASHKIT_JOURNAL_MB or SGLANG_CRASHKIT_KEEP_FREE_MB lower",
            settings.journal_mb,
            folder,
            problem,
        )
        return None
    return JournalWriter(new_ring(Path(folder)), size)


class JournaledStates(dict[str, Any]):
    """The requests under way by id, as ``rid_to_state`` holds them, each change of which is noted in a journal.

    When the journal fails it is switched off with one warning, and this is an ordinary dictionary.

    Args:
        states: the requests under way now.
        journal: where they are noted.
    """

    def __init__(self, states: Mapping[str, Any], journal: JournalWriter) -> None:
        super().__init__()
        self._journal: JournalWriter | None = journal
        self._numbers: dict[str, int] = {}
        self._warned = False
        self.update(states)

    def __setitem__(self, rid: str, state: Any) -> None:
        earlier = self.get(rid)
        super().__setitem__(rid, state)
        if earlier is not state:
            self._note(self._begin, rid, earlier, state)

    def __delitem__(self, rid: str) -> None:
        state = self.get(rid)
        super().__delitem__(rid)
        self._note(self._end, rid, state)

    def pop(self, rid: str, *default: Any) -> Any:
        """Remove a request as `dict.pop` does."""
        is_there = rid in self
        state = super().pop(rid, *default)
        if is_there:
            self._note(self._end, rid, state)
        return state

    def popitem(self) -> tuple[str, Any]:
        """Remove a request as `dict.popitem` does."""
        rid, state = super().popitem()
        self._note(self._end, rid, state)
        return rid, state

    def setdefault(self, rid: str, default: Any = None) -> Any:
        """Add a request as `dict.setdefault` does."""
        if rid not in self:
            self[rid] = default
        return self[rid]

    def update(self, *others: Any, **named: Any) -> None:
        """Add requests as `dict.update` does."""
        for rid, state in dict(*others, **named).items():
            self[rid] = state

    def __ior__(self, other: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> JournaledStates:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """Remove all requests."""
        for rid in list(self):
            del self[rid]

    def _note(self, change: Callable[..., None], *arguments: Any) -> None:
        journal = self._journal
        if journal is None:
            return
        try:
            change(journal, *arguments)
            if journal.lost and not self._warned:
                self._warned = True
                logger.warning(
                    "crash kit: the request journal is too small for the requests under way, the oldest are left out; "
                    "next: set SGLANG_CRASHKIT_JOURNAL_MB higher"
                )
        except Exception:
            self._journal = None
            logger.warning("crash kit: the request journal is switched off", exc_info=True)

    def _begin(self, journal: JournalWriter, rid: str, earlier: Any, state: Any) -> None:
        if earlier is not None:
            self._end(journal, rid, earlier)
        try:
            request = read_request(state.obj)
        except Exception as error:  # noqa: BLE001 - another request may be an ordinary one
            request = {"rid": rid, "omitted": {"request": f"{type(error).__name__}: {error}"}}, None, None
        self._numbers[rid] = journal.begin(*request)

    def _end(self, journal: JournalWriter, rid: str, state: Any) -> None:
        number = self._numbers.pop(rid, None)
        if number is not None:
            journal.end(number, finished=bool(getattr(state, "finished", False)))


def read_request(request: Any) -> tuple[dict[str, Any], object, object]:
    """Return what is kept of a request, its text, and its token ids.

    Fields with their default value are left out. Images and other large inputs, and fields that this release has and
    the kit does not know, are described below ``omitted``; secrets are taken out.

    Args:
        request: SGLang's ``GenerateReqInput`` or ``EmbeddingReqInput``, of one request.
    """
    kind = type(request)
    values = vars(request)
    fields: dict[str, Any] = {"kind": kind.__name__}
    omitted: dict[str, str] = {}
    for name, value in values.items():
        if value is None or name in _INTERNAL or value is getattr(kind, name, None):
            continue
        if name in _KEPT:
            fields[name] = _without_secrets(value) if type(value) is dict else value
        else:
            omitted[name] = describe(value)
    text, input_ids = values.get("text"), values.get("input_ids")
    if values.get("no_logs"):
        omitted |= {name: _WITHHELD for name in ("text", "input_ids") if values.get(name) is not None}
        text = input_ids = None
    if omitted:
        fields["omitted"] = omitted
    return fields, text, input_ids


def _without_secrets(mapping: dict[Any, Any]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for name, value in mapping.items():
        if isinstance(name, str) and value is not None and _is_secret_name(name):
            result[name] = REDACTED
        else:
            result[name] = _without_secrets(value) if type(value) is dict else value
    return result
