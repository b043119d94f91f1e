"""Note the requests of a tokenizer manager in its journal as they come and go.

All of SGLang's releases keep the requests under way in one dictionary, ``TokenizerManager.rid_to_state``: whatever
enters or leaves it was begun or has ended. A dictionary that notes this stands in for it.
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
        "video_max_dynamic_patch use_audio_in_video return_pooled_hidden_states return_flat_raw_top_logprobs "
        "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 custom_logit_processor "
        "multi_item_delimiter_indices token_indices_to_pool"
    ).split()
)
#: What the server itself adds, or no answer depends on, of no use to anybody else.
_INTERNAL = frozenset(
    (  # noqa: SIM905 - as above
        "text input_text input_ids is_single batch_size parallel_sample_num http_worker_ipc lora_id received_time "
        "validation_time external_trace_header need_wait_for_image need_wait_for_mm_inputs num_items_assigned "
        "encoder_urls received_time_perf custom_labels cache_salt"
    ).split()
)
#: Those that are withheld as prompts are: what a prompt is expected to be answered with, and a program of the user's.
_LIKE_PROMPTS = frozenset({"token_ids_logprob", "custom_logit_processor"})
_SCALARS = frozenset({bool, int, float})
_EMPTIABLE = frozenset({str, list, dict})
#: What SGLang works out of the other sampling parameters.
_DERIVED = frozenset({"stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant"})
#: What a client chose as a number may have any length.
_MAX_BITS = 64
#: So many ids of a set are put in order.
_MAX_SORTED = 4096
_MAX_ERROR = 200

#: Of the few classes of requests that there are.
_defaults: dict[type, dict[str, Any]] = {}

#: Those of this process.
_opened: list[weakref.ref[JournaledStates]] = []


def open_journal(states: Mapping[str, Any]) -> JournaledStates | None:
    """Return what notes these and later requests in a journal; None where none is wanted; see also `held_memory`."""
    settings = Settings.from_environ()
    if not settings.journal:
        return None
    size = int(settings.journal_mb * 2**20)
    journal = held_memory("journal", lambda: JournalWriter(size), "no request journal")
    return JournaledStates(states, journal, settings.prompts) if journal is not None else None


@never_raises
def retire_journals() -> None:
    """Give back the journals of ended engines, which SGLang keeps until the program ends."""
    while _opened:
        states = _opened.pop()()
        if states is not None:
            states.retire()


class JournaledStates(dict[str, Any]):
    """The requests under way by id, as ``rid_to_state`` holds them, each change of which is noted in a journal.

    When the journal fails it is switched off with one warning, and this is an ordinary dictionary.
    """

    def __init__(self, states: Mapping[str, Any], journal: JournalWriter, prompts: Prompts = "full") -> None:
        super().__init__()
        self._journal: JournalWriter | None = journal
        self._prompts: Prompts = prompts
        #: The number of each request under way, by the identity of its state: clients may give several the same id.
        self._numbers: dict[int, int] = {}
        #: States whose place here another request of the same id took, by number, and the numbers of those that are
        #: gone, which are noted with the next change: Python collects garbage anywhere.
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
        """Note that a request under way, or each, is aborted: its client had gone, or somebody asked for its end."""
        for one in list(self) if abort_all else [rid]:
            # A client may have sent anything.
            state = self.get(one) if isinstance(one, str) else None
            if state is not None:
                self._note(self._abort, state)

    def retire(self) -> None:
        """Give the journal's memory back; this is an ordinary dictionary from now on."""
        journal, self._journal = self._journal, None
        if journal is not None:
            # Another thread may be writing to it.
            with contextlib.suppress(BufferError):
                journal.close()

    # Of `dict` these would pass the methods above by.
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
                    "crash kit: the request journal is too small for the requests under way, the oldest are left out; "
                    "next: set SGLANG_CRASHKIT_JOURNAL_MB higher"
                )
        except Exception:
            self._journal = None
            logger.warning("crash kit: the request journal is switched off", exc_info=True)
            # It would call requests unfinished that were answered since.
            with contextlib.suppress(ValueError):
                journal.invalidate()

    def _begin(self, journal: JournalWriter, rid: str, earlier: Any, state: Any) -> None:
        if earlier is not None:
            self._replace(journal, earlier)
        try:
            request = read_request(state.obj, self._prompts)
        except Exception as error:  # noqa: BLE001 - another request may be an ordinary one
            why = f"{type(error).__name__}: {str(error)[:_MAX_ERROR]}"
            request = {"rid": short_rid(rid), "omitted": {"request": why}}, None, None
        self._numbers[id(state)] = journal.begin(*request)

    def _replace(self, journal: JournalWriter, state: Any) -> None:
        """Follow a request whose place another one of the same id took, until its answer is not awaited."""
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
    """Return what is kept of one request, a ``GenerateReqInput`` or ``EmbeddingReqInput``, its text, and its token ids.

    The ``Tokenized`` classes, which schedulers are sent, are as good; their sampling parameters are an object.

    Fields with their default value are left out. Large inputs, fields that the kit does not know, and what `prompts`
    keeps back are described below ``omitted``. The crash handler searches for secrets before it writes to a disk: here
    a client could make that long.
    """
    kind, values = type(request), _values_of(request)
    if (sampling := values.get("sampling_params")) is not None and type(sampling) is not dict:
        values = values | {"sampling_params": _sampling_of(sampling)}
    fields: dict[str, Any] = {"kind": kind.__name__}
    omitted: dict[str, str] = {}
    room = MAX_WEIGHT
    # In C where it can be: a request has about seventy fields, most of which are not set.
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
    """Return what ``SamplingParams`` have beside their defaults, by the names that a client gives them."""
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
    """Return the default values of a class's fields by name; None is that of any other."""
    found = _defaults.get(kind)
    if found is None and hasattr(kind, "__struct_fields__"):
        found = _defaults[kind] = {one.name: one.default for one in msgspec.structs.fields(kind)}
    if found is None:
        bases = reversed(kind.__mro__)
        found = {name: value for base in bases for name, value in vars(base).items() if value is not None}
        _defaults[kind] = found
    return found
