"""Record the start and the end of each request of a tokenizer manager in its journal.

All of SGLang's releases keep the requests in progress in one dictionary, ``TokenizerManager.rid_to_state``: a request
starts when it is added, and ends when it is removed. `JournaledStates` replaces the dictionary and records both.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from itertools import compress
from typing import Any

import msgspec.structs

from sglang_crashkit.memory.journal import MAX_WEIGHT, JournalWriter, describe, weigh
from sglang_crashkit.model.step import short_rid
from sglang_crashkit.settings import Prompts, Settings
from sglang_crashkit.srt.hooks import held_memory, never_raises

logger = logging.getLogger(__name__)

#: Fields of a request that are kept besides its prompt: those that the answer depends on, and where it was sent.
_KEPT = frozenset(
    (  # noqa: SIM905 - as a list it would be fifty lines
        "rid sampling_params stream return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
        "return_text_in_logprobs return_hidden_states return_routed_experts routed_experts_start_len "
        "return_indexer_topk return_entropy return_prompt_token_ids return_sampling_mask sampling_logprobs_mode "
        "return_bytes log_metrics modalities session_id session_params conversation_id lora_path dimensions "
        "is_cross_encoder_request bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size "
        "data_parallel_rank routed_dp_rank disagg_prefill_dp_rank routing_key extra_key priority background "
        "require_reasoning max_thinking_tokens no_logs max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
        "video_max_dynamic_patch use_audio_in_video return_pooled_hidden_states return_flat_raw_top_logprobs "
        "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 custom_logit_processor "
        "multi_item_delimiter_indices token_indices_to_pool"
    ).split()
)
#: Fields that are skipped silently: the server itself adds them, or no answer depends on them.
_INTERNAL = frozenset(
    (  # noqa: SIM905 - as above
        "text input_text input_ids is_single batch_size parallel_sample_num http_worker_ipc lora_id received_time "
        "validation_time external_trace_header need_wait_for_image need_wait_for_mm_inputs num_items_assigned "
        "encoder_urls received_time_perf custom_labels cache_salt"
    ).split()
)
#: Fields that are withheld like prompts: the tokens that an answer is expected to have, and a user's program.
_LIKE_PROMPTS = frozenset({"token_ids_logprob", "custom_logit_processor"})
_SCALARS = frozenset({bool, int, float})
_EMPTIABLE = frozenset({str, list, dict})
#: Sampling parameters that SGLang derives from the others.
_DERIVED = frozenset({"stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant"})
#: A longer integer is weighed like a text: a client may send a number of any length.
_MAX_BITS = 64
#: The size of the largest set of ids that is sorted; a larger set is only described.
_MAX_SORTED = 4096
_MAX_ERROR = 200

#: The default values of the fields of each class of requests; there are few classes.
_defaults: dict[type, dict[str, Any]] = {}

#: The journaled dictionaries of this process.
_opened: list[weakref.ref[JournaledStates]] = []


def open_journal(states: Mapping[str, Any]) -> JournaledStates | None:
    """Return a dictionary that records `states` and later requests in a journal; None if it is off or unavailable."""
    settings = Settings.from_environ()
    if not settings.journal:
        return None
    size = int(settings.journal_mb * 2**20)
    journal = held_memory("journal", lambda: JournalWriter(size), "no request journal")
    return JournaledStates(states, journal, settings.prompts) if journal is not None else None


@never_raises
def retire_journals() -> None:
    """Free the memory of ended engines' journals, which SGLang would keep until the program ends."""
    while _opened:
        states = _opened.pop()()
        if states is not None:
            states.retire()


class JournaledStates(dict[str, Any]):
    """The requests in progress by id, as in ``rid_to_state``; each change is recorded in a journal.

    If the journal fails, it is switched off with one warning, and this becomes an ordinary dictionary.
    """

    def __init__(self, states: Mapping[str, Any], journal: JournalWriter, prompts: Prompts = "full") -> None:
        super().__init__()
        self._journal: JournalWriter | None = journal
        self._prompts: Prompts = prompts
        #: The journal's number of each request, by the identity of its state: clients may give several the same id.
        self._numbers: dict[int, int] = {}
        #: States that were replaced by another request of the same id, by number; the numbers of those that Python has
        #: deleted since, which the next change records: Python may collect garbage at any point.
        self._replaced: dict[int, weakref.ref[Any]] = {}
        self._gone: deque[int] = deque()
        self._warned = False
        self.update(states)
        _opened.append(weakref.ref(self))

    def __setitem__(self, rid: str, state: Any) -> None:
        earlier = self.get(rid)
        super().__setitem__(rid, state)
        if earlier is not state:
            self._note(self._begin, rid, earlier, state)

    def __delitem__(self, rid: str) -> None:
        state = self.get(rid)
        super().__delitem__(rid)
        self._note(self._end, state)

    def pop(self, rid: str, *default: Any) -> Any:
        """Remove a request as `dict.pop` does."""
        is_there = rid in self
        state = super().pop(rid, *default)
        if is_there:
            self._note(self._end, state)
        return state

    def abort(self, rid: str = "", abort_all: bool = False, *_args: Any, **_kwargs: Any) -> None:
        """Record that a request in progress, or each, is aborted: its client is gone, or the abort was requested."""
        for one in list(self) if abort_all else [rid]:
            # A client may send an id of any type.
            state = self.get(one) if isinstance(one, str) else None
            if state is not None:
                self._note(self._abort, state)

    def retire(self) -> None:
        """Free the journal's memory; this becomes an ordinary dictionary."""
        journal, self._journal = self._journal, None
        if journal is not None:
            # Another thread may be writing to it.
            with contextlib.suppress(BufferError):
                journal.close()

    # Those of `dict` would bypass the methods above.
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update
    clear = MutableMapping.clear
    popitem = MutableMapping.popitem

    def _note(self, change: Callable[..., None], *arguments: Any) -> None:
        journal = self._journal
        if journal is None:
            return
        try:
            while self._gone:
                number = self._gone.popleft()
                del self._replaced[number]
                journal.end(number, finished=False)
            change(journal, *arguments)
            if not self._warned and journal.lost:
                self._warned = True
                logger.warning(
                    "crash kit: the request journal is too small for the requests in progress; the oldest are dropped; "
                    "next: set SGLANG_CRASHKIT_JOURNAL_MB higher"
                )
        except Exception:
            self._journal = None
            logger.warning("crash kit: the request journal is switched off", exc_info=True)
            # Otherwise the journal would show requests as unfinished that are answered later.
            with contextlib.suppress(ValueError):
                journal.invalidate()

    def _begin(self, journal: JournalWriter, rid: str, earlier: Any, state: Any) -> None:
        if earlier is not None:
            self._replace(journal, earlier)
        try:
            request = read_request(state.obj, self._prompts)
        except Exception as error:  # noqa: BLE001 - the next request may be readable
            why = f"{type(error).__name__}: {str(error)[:_MAX_ERROR]}"
            request = {"rid": short_rid(rid), "omitted": {"request": why}}, None, None
        self._numbers[id(state)] = journal.begin(*request)

    def _replace(self, journal: JournalWriter, state: Any) -> None:
        """Follow a request that another one of the same id replaced, until Python deletes its state."""
        number = self._numbers.get(id(state))
        if number is None or getattr(state, "finished", False):
            self._end(journal, state)
            return
        try:
            self._replaced[number] = weakref.ref(state, lambda _state: self._gone.append(number))
        except TypeError:
            self._end(journal, state)
        else:
            del self._numbers[id(state)]

    def _abort(self, journal: JournalWriter, state: Any) -> None:
        number = self._numbers.get(id(state))
        if number is not None:
            journal.abort(number)

    def _end(self, journal: JournalWriter, state: Any) -> None:
        number = self._numbers.pop(id(state), None)
        if number is not None:
            journal.end(number, finished=bool(getattr(state, "finished", False)))


def read_request(request: Any, prompts: Prompts = "full") -> tuple[dict[str, Any], object, object]:
    """Return the kept fields of a ``GenerateReqInput`` or ``EmbeddingReqInput``, its text, and its token ids.

    The ``Tokenized`` classes, which schedulers receive, work as well; their sampling parameters are an object.

    Fields with their default value are left out. ``omitted`` describes large inputs, fields that the kit does not know,
    and fields that `prompts` withholds. The crash handler searches for secrets before it writes to a disk: here a
    client could make that search long.
    """
    kind, values = type(request), _values_of(request)
    if (sampling := values.get("sampling_params")) is not None and type(sampling) is not dict:
        values = values | {"sampling_params": _sampling_of(sampling)}
    fields: dict[str, Any] = {"kind": kind.__name__}
    omitted: dict[str, str] = {}
    room = MAX_WEIGHT
    # `map` and `compress` run in C: a request has about seventy fields, most of which are not set.
    is_set = map(operator.is_not, values.values(), map(_defaults_of(kind).get, values))
    for name, value in compress(values.items(), is_set):
        if value is None or name in _INTERNAL:
            continue
        if name not in _KEPT:
            # An empty list of images counts as no image.
            if type(value) not in _EMPTIABLE or value:
                omitted[name] = describe(value)
        elif name == "rid":
            fields[name] = short_rid(value)
        elif type(value) in _SCALARS and (type(value) is not int or value.bit_length() <= _MAX_BITS):
            fields[name] = value
        elif name in _LIKE_PROMPTS and (prompts == "none" or values.get("no_logs")):
            omitted[name] = _why_withheld(values, prompts, value)
        elif (weight := weigh(value, room)) > room:
            omitted[name] = describe(value)
        else:
            room -= weight
            fields[name] = value
    text, input_ids = values.get("text", values.get("input_text")), values.get("input_ids")
    prompt = {"text": text, "input_ids": input_ids}
    for name, value in prompt.items():
        is_allowed = prompts == "full" or (prompts == "ids" and name == "input_ids")
        if value is not None and (values.get("no_logs") or not is_allowed):
            omitted[name], prompt[name] = _why_withheld(values, prompts, value), None
    if omitted:
        fields["omitted"] = omitted
    return fields, prompt["text"], prompt["input_ids"]


def _why_withheld(values: Mapping[str, Any], prompts: Prompts, value: object) -> str:
    if values.get("no_logs"):
        return "withheld: the request asks for no logs"
    return f"withheld by SGLANG_CRASHKIT_PROMPTS={prompts}: {describe(value)}"


def _values_of(request: Any) -> dict[str, Any]:
    names = getattr(request, "__struct_fields__", None)
    return vars(request) if names is None else {name: getattr(request, name) for name in names}


def _sampling_of(sampling: Any) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, by the names that a client gives them."""
    kind = type(sampling)
    if kind not in _defaults:
        _defaults[kind] = _values_of(kind())
    defaults = _defaults[kind]
    said = {name: value for name, value in _values_of(sampling).items() if value != defaults.get(name)}
    kept = {name.removesuffix("_strs"): value for name, value in said.items() if name not in _DERIVED}
    return {
        name: (sorted(value) if len(value) <= _MAX_SORTED else describe(value)) if isinstance(value, set) else value
        for name, value in kept.items()
    }


def _defaults_of(kind: type) -> dict[str, Any]:
    """Return the default values of a class's fields by name; the default of an absent field is None."""
    found = _defaults.get(kind)
    if found is None and hasattr(kind, "__struct_fields__"):
        found = _defaults[kind] = {one.name: one.default for one in msgspec.structs.fields(kind)}
    if found is None:
        bases = reversed(kind.__mro__)
        found = {name: value for base in bases for name, value in vars(base).items() if value is not None}
        _defaults[kind] = found
    return found
