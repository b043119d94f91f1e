from __future__ import annotations

import json

from sglang_crashkit.capture.cuda_core.model import (
    SCHEMA_VERSION,
    CudaCore,
    Place,
    Warp,
    exception_in_words,
    status_in_words,
)

WARPS = tuple(Warp(0, 0, number, 7, (0, 0, 0), ((pc, 32),)) for number, pc in enumerate((0x20, 0x10, 0x20, 0x30)))


def test_codes_have_words() -> None:
    assert exception_in_words(14) == "warp illegal address"
    assert exception_in_words(999) == "exception 999"
    assert (status_in_words(2), status_in_words(999)) == ("active", "")


def test_it_becomes_json() -> None:
    core = CudaCore((), (), (), WARPS, ((Place(0x20, "spin", 4), 2),), "580.65", "13.0", None, True, (), ())
    document = json.loads(json.dumps(core.to_json()))
    assert document["schema_version"] == SCHEMA_VERSION
    assert document["hot"] == [{"address": 0x20, "function": "spin", "offset": 4, "symbol": None, "warps": 2}]
    assert len(document["warps"]) == 4
    assert "warps" not in core.to_json(warps=False)
