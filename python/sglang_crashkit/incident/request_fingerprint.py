"""The fingerprint of a request: the same of one that comes and of what an incident kept of it.

SGLang fills in the defaults of a request after it came and before it is noted, so that what counts as not given here is
left out. What of it is for the server alone, such as its id, is left out, too.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from sglang_crashkit.redact import REDACTED

#: What an answer depends on beside the prompt.
PARAMETERS = (
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
    *("return_indexer_topk", "return_entropy", "return_prompt_token_ids", "return_sampling_mask"),
    *("sampling_logprobs_mode", "return_pooled_hidden_states", "session_params", "lora_path", "extra_key"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"),
    *("dimensions", "is_cross_encoder_request", "require_reasoning", "max_thinking_tokens"),
    *("custom_logit_processor", "multi_item_delimiter_indices", "token_indices_to_pool"),
)
#: What else a prompt may be made of, or an answer depend on, and an incident does not keep.
OTHER_INPUTS = (
    *("image_data", "audio_data", "video_data", "input_embeds", "video_config"),
    *("positional_embed_overrides", "embed_overrides", "watermark"),
)
_PARTS = ("omitted", "truncated", *OTHER_INPUTS)
#: Of a prompt about as many characters or token ids are in its sample.
_SAMPLED = 16
#: Where 0 is no default.
_START = "logprob_start_len"


class RequestFingerprint(NamedTuple):
    """What tells a request again."""

    length: int  # of its prompt, in characters or token ids
    digest: str  # a hash of its prompt
    rest: str  # a hash of all its parameters

    @property
    def key(self) -> str:
        """All of it, in short."""
        return hashlib.sha256(f"{self.digest} {self.rest}".encode()).hexdigest()[:16]


def fingerprint_of(fields: Mapping[str, Any]) -> RequestFingerprint | None:
    """Return the fingerprint of a request; None where some of it is not there: an image, or what was not kept.

    It is a line of ``requests/requests.jsonl``, what upstream's pickle has, or what came.
    """
    prompt = prompt_of(fields.get)
    if prompt is None or any(map(fields.get, _PARTS)) or any(redacted_in(_set_in(fields))):
        return None
    digest = digest_of(prompt)
    return RequestFingerprint(len(prompt), digest, rest_of(fields)) if digest else None


def rest_of(fields: Mapping[str, Any]) -> str:
    """Return a hash of what a request asks for beside its prompt; see above."""
    told = _set_in(fields)
    sampling = told.get("sampling_params")
    if isinstance(sampling, dict):
        # For an embedding SGLang puts a 0 there.
        kept = {
            name: value
            for name, value in sampling.items()
            if value is not None and (name != "max_new_tokens" or value != 0)
        }
        told["sampling_params"] = kept
        if not kept:
            del told["sampling_params"]
    text = json.dumps(told, sort_keys=True)
    if "NaN" in text or "Infinity" in text:
        # An incident has words in their place.
        text = json.dumps(json.loads(text, parse_constant=str), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def parameters_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request asks for beside its prompt, by name, those of ``sampling_params`` with a dot."""
    told = _set_in(fields)
    sampling = told.pop("sampling_params", None)
    inner = sampling if isinstance(sampling, dict) else {}
    return {f"sampling_params.{name}": value for name, value in inner.items() if value is not None} | told


def _set_in(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name in PARAMETERS if not _is_unset(name, value := fields.get(name))}


def _is_unset(name: str, value: object) -> bool:
    return value in (None, -1) if name == _START else not value


def prompt_of(get: Callable[[str], Any]) -> str | Sequence[int] | None:
    """Return the text or the token ids of a request, None where it has neither."""
    text = get("text")
    ids = get("input_ids") if text is None else None
    return text if isinstance(text, str) else ids if isinstance(ids, (list, tuple)) else None


def redacted_in(value: object, name: str = "") -> Iterator[str]:
    """Yield the names in a mapping of what an incident does not keep, as it may be a secret; with dots where deep."""
    if isinstance(value, Mapping):
        for its, one in value.items():
            yield from redacted_in(one, f"{name}.{its}" if name else str(its))
    elif value == REDACTED:
        yield name


def sample_of(prompt: str | Sequence[int]) -> int | None:
    """Return a number that two prompts of one length seldom have in common, in a time that does not grow with that.

    It is of characters or token ids all over the prompt: in a chat, first and last ones are everybody's. None where it
    is no token ids.
    """
    some = prompt[:: len(prompt) // _SAMPLED or 1]
    try:
        return crc32(some.encode(errors="surrogatepass") if isinstance(some, str) else array("q", some))
    except (TypeError, OverflowError):
        return None


def digest_of(prompt: str | Sequence[int]) -> str:
    """Return a hash of a prompt; empty where it is no token ids."""
    if isinstance(prompt, str):
        return hashlib.sha256(prompt.encode(errors="surrogatepass")).hexdigest()
    try:
        return hashlib.sha256(array("q", prompt).tobytes()).hexdigest()
    except (TypeError, OverflowError):
        return ""
