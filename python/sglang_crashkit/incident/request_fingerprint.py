"""The fingerprint of a request, by which a suspect of an earlier incident is known again.

SGLang fills in the defaults of a request before it is noted, so what counts as not given is left out here; so is what
of it is for the server alone, such as its id.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_crashkit.redact import REDACTED

#: What an answer depends on beside the prompt.
_PARAMETERS = (
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
    *("return_indexer_topk", "return_entropy", "return_prompt_token_ids", "return_sampling_mask"),
    *("sampling_logprobs_mode", "return_pooled_hidden_states", "session_params", "lora_path", "extra_key"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"),
    *("dimensions", "is_cross_encoder_request", "require_reasoning", "max_thinking_tokens"),
    *("custom_logit_processor", "multi_item_delimiter_indices", "token_indices_to_pool"),
)
#: What else a prompt may be made of, or an answer depend on, and an incident does not keep.
_NOT_KEPT = (
    *("omitted", "truncated", "image_data", "audio_data", "video_data", "input_embeds", "video_config"),
    *("positional_embed_overrides", "embed_overrides", "watermark"),
)
#: Where 0 is no default.
_START = "logprob_start_len"


def fingerprint_of(fields: Mapping[str, Any]) -> str:
    """Return the fingerprint of a line of ``requests/requests.jsonl``; empty where some of the request is not kept."""
    asked, prompt = _set_in(fields), _prompt_of(fields)
    if not prompt or any(map(fields.get, _NOT_KEPT)) or any(redacted_in(asked)):
        return ""
    return hashlib.sha256(prompt + json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def parameters_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request asks for beside its prompt, by name, those of ``sampling_params`` with a dot."""
    asked = _set_in(fields)
    sampling = asked.pop("sampling_params", None)
    inner = sampling if isinstance(sampling, dict) else {}
    return {f"sampling_params.{name}": value for name, value in inner.items()} | asked


def redacted_in(value: object, name: str = "") -> Iterator[str]:
    """Yield the names in a mapping of what an incident does not keep, as it may be a secret; with dots where deep."""
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
    """Return a hash of the text or the token ids of a request, with which; empty where it has neither."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if isinstance(text, str):
        return b"text" + hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    if text is None and isinstance(ids, (list, tuple)):
        try:
            return b"ids" + hashlib.sha256(array("q", ids).tobytes()).digest()
        except (TypeError, OverflowError):
            # They are no token ids.
            return b""
    return b""
