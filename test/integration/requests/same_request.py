"""Run by a lane's python: requests of SGLang's own class are recognised again by what the journal has of them.

Prints how many were, and ends with 1 at the first that is not.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_crashkit.incident.quarantine import Entry, Index, Origin, entry_of_all
from sglang_crashkit.memory.journal import decode_request, encode_begin
from sglang_crashkit.srt.managers.quarantine import Quarantine
from sglang_crashkit.srt.request_journal import RequestReader

COUNT = 2000
ORIGIN = Origin("", "", "/model", "")
SAMPLING = {
    "temperature": [0, 0.7, 1],
    "max_new_tokens": [0, 4],
    "stop": [["a"], None],
    "n": [1, 2],
    "custom_params": [{"token": "x"}, {"a": (1, 2)}],
    "json_schema": ["{}"],
}


def some(names: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: random.choice(values) for name, values in names.items() if random.random() < 0.3}


def request() -> Any:
    """Return a request as it comes."""
    count = random.choice([None, None, 1, 3])
    prompt = random.choice(["Hello", [1, 2, 3]])
    name = "text" if isinstance(prompt, str) else "input_ids"
    body: dict[str, Any] = {name: prompt if count is None else [prompt] * count}

    def each(values: list[Any]) -> Any:
        return random.choice(values) if count is None or random.random() < 0.5 else random.choices(values, k=count)

    if random.random() < 0.2:
        return EmbeddingReqInput(**body)
    sampling = each([some(SAMPLING) for _ in range(3)])
    if isinstance(sampling, list):
        for one in sampling:
            one["n"] = sampling[0].get("n", 1)
    body |= some(
        {
            "sampling_params": [sampling],
            "return_logprob": [each([True, False])],
            "logprob_start_len": [each([0, -1, 2])],
            "top_logprobs_num": [each([0, 5])],
            "token_ids_logprob": [[], [1, 2]] if count is None else [[1, 2], [[1]] * count],
            "return_hidden_states": [True],
            "return_text_in_logprobs": [True],
            "lora_path": ["x"],
            "stream": [True],
            "priority": [3],
            "session_params": [{"id": "s"}] if count is None else [None],
        }
    )
    return GenerateReqInput(**body)


def entries_of(came: Any) -> list[Entry | None]:
    """Return an entry for each request of what may be a batch, as the journal has it."""
    filled = copy.deepcopy(came)
    try:
        filled.normalize_batch_and_arguments()
    except ValueError:
        # SGLang does not take it.
        return []
    reader, found = RequestReader(), []
    for one in [filled] if filled.is_single else [filled[number] for number in range(len(filled.rid))]:
        fields, text, input_ids = reader.read(one)
        line = decode_request(encode_begin(1, 1.0, fields, text, input_ids, 1 << 20))
        found.append(entry_of_all(json.loads(json.dumps(line)), ORIGIN, time.time()))
    return found


def main() -> None:
    random.seed(1)
    quarantine, known = Quarantine(Path("none"), "/model", ""), 0
    for _ in range(COUNT):
        came = request()
        for entry in entries_of(came):
            quarantine._index = Index([entry] if entry is not None else [])
            if entry is None or quarantine.find(came) != entry:
                sys.exit(f"not recognised: {vars(came)}, of which the journal has {entry}")
            known += 1
    sys.stdout.write(f"{known}\n")


if __name__ == "__main__":
    main()
