from __future__ import annotations

import pytest

from sglang_crashkit.capture import tools
from sglang_crashkit.capture.cuda_core import demangle as module
from sglang_crashkit.capture.cuda_core.demangle import demangle


def test_only_cxx_names_are_demangled() -> None:
    names = ["_Z11spin_kernelPVi", "triton_poi_fused_0", "_Zbad", "_Z11copy_kernelPKfPfi", "_Z4evil\0x"]
    assert demangle(names) == (
        {
            "_Z11spin_kernelPVi": "spin_kernel(int volatile*)",
            "_Z11copy_kernelPKfPfi": "copy_kernel(float const*, float*, int)",
        },
        "",
    )


def test_no_process_is_started_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "run_tool", None)
    assert demangle(["triton_poi_fused_0"]) == ({}, "")
    assert demangle(["_Z" + "1" * (1 << 20)]) == ({}, "they are too long")


def test_a_name_that_stands_for_too_much_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each type is twice the one before: this one has 2 to the power of 60 arguments.
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    numbers = [digits[n] if n < 36 else digits[n // 36] + digits[n % 36] for n in range(60)]
    name = "_Z1f1AIiiE" + "".join(f"S_IS{number}_S{number}_E" for number in numbers)
    monkeypatch.setattr(module, "_DEADLINE_SECS", 0.5)
    names, problem = demangle([name])
    assert names == {}
    assert "did not end within 0.5 s" in problem or "status" in problem
