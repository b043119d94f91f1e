"""Kernels that fail, launched in a scheduler by a signal: one that never ends, one that writes where nothing is.

They are PTX, which the driver compiles, so that no compiler is needed; each is launched by the driver's own functions
in the context and on the stream that torch uses.
"""

from __future__ import annotations

import signal

SPIN, ILLEGAL = "crashkit_spin", "crashkit_illegal"
SPIN_SIGNAL, ILLEGAL_SIGNAL = signal.SIGRTMIN + 7, signal.SIGRTMIN + 8

PTX = f"""\
.version 7.0
.target sm_70
.address_size 64

.visible .entry {SPIN}(.param .u64 flag)
{{
    .reg .u64 %address;
    .reg .u32 %value;
    .reg .pred %again;
    ld.param.u64 %address, [flag];
    cvta.to.global.u64 %address, %address;
LOOP:
    ld.volatile.global.u32 %value, [%address];
    setp.eq.u32 %again, %value, 0;
    @%again bra LOOP;
    ret;
}}

.visible .entry {ILLEGAL}(.param .u64 flag)
{{
    .reg .u64 %address;
    .reg .u32 %value;
    ld.param.u64 %address, [flag];
    mov.u32 %value, 1;
    st.volatile.global.u32 [%address], %value;
    ret;
}}
"""
#: An address that no allocation of CUDA's has.
NOWHERE = 0x10
#: Python runs it before anything else; torch is there by the time that the signal comes.
SITE_CODE = f"""
import ctypes
import signal

PTX = {PTX!r}


def launch(name, address=None):
    import torch

    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(PTX.encode())))
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, ctypes.c_char_p(name.encode())))
    pointer = ctypes.c_uint64(flag.data_ptr() if address is None else address)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sizes = [ctypes.c_uint(size) for size in (1, 1, 1, 32, 1, 1, 0)]
    check(driver.cuLaunchKernel(function, *sizes, stream, parameters, None))
    torch.cuda.synchronize()


def check(status):
    if status:
        raise RuntimeError(f"the CUDA driver answered {{status}}")


signal.signal({int(SPIN_SIGNAL)}, lambda *_: launch({SPIN!r}))
signal.signal({int(ILLEGAL_SIGNAL)}, lambda *_: launch({ILLEGAL!r}, {NOWHERE:#x}))
"""
