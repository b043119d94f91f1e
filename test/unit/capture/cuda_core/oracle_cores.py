"""The cores that the kit's reader and NVIDIA's own must agree on."""

from __future__ import annotations

from collections.abc import Sequence

from unit.synthetic_core import (
    CUBIN,
    SPIN,
    BlockSpec,
    CoreSpec,
    DeviceSpec,
    GridSpec,
    SmSpec,
    WarpSpec,
)

COPY = SPIN + 0x1000
ALL = range(32)
#: The SMs and warps of an H200, each full to a quarter.
_SMS, _WARPS = 132, 16


def _core(warps: Sequence[WarpSpec], grid: GridSpec | None = None, **options: object) -> CoreSpec:
    grid = grid or GridSpec(7, SPIN, (2, 1, 1), (64, 1, 1), host_thread=4711)
    sms = [SmSpec(0, [BlockSpec(grid.grid_id, (1, 0, 0), warps)]), SmSpec(1), SmSpec(2)]
    return CoreSpec([DeviceSpec([grid], sms, sm_count=3)], [CUBIN], **options)  # type: ignore[arg-type]


def _hung(**options: object) -> CoreSpec:
    return _core([WarpSpec(3, [SPIN + 0x110] * 32)], **options)


def _two_gpus() -> CoreSpec:
    one = DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0, [BlockSpec(7, warps=[WarpSpec(3, [SPIN + 8] * 32)])])], sm_count=1)
    failed = WarpSpec(5, [COPY + 0x40] * 32, error=COPY + 0x40, failed=dict.fromkeys(ALL, 6))
    sms = [SmSpec(0), SmSpec(1, [BlockSpec(9, (3, 1, 0), [failed])])]
    other = DeviceSpec(
        [GridSpec(9, COPY, (8, 2, 1), (32, 1, 1))], sms, name="NVIDIA B200", sm_type="sm_100", sm_count=2
    )
    return CoreSpec([one, other], [CUBIN])


def _two_kernels() -> CoreSpec:
    partial = WarpSpec(4, [COPY + 0x10] * 7, valid=0x7F, active=0x0F)
    blocks = [
        BlockSpec(7, (1, 0, 0), [WarpSpec(3, [SPIN + 0x110] * 32)]),
        BlockSpec(8, (0, 0, 0), [partial, WarpSpec(9, [COPY + 0x90] * 32)]),
    ]
    grids = [GridSpec(7, SPIN, (2, 1, 1)), GridSpec(8, COPY, block=(39, 1, 1))]
    return CoreSpec([DeviceSpec(grids, [SmSpec(0, blocks)], sm_count=1)], [CUBIN])


def _whole_gpu() -> CoreSpec:
    sms = [
        SmSpec(sm, [BlockSpec(7, (sm, 0, 0), [WarpSpec(warp, [SPIN + 0x10 * warp] * 32) for warp in range(_WARPS)])])
        for sm in range(_SMS)
    ]
    grid = GridSpec(7, SPIN, (_SMS, 1, 1), (32 * _WARPS, 1, 1))
    return CoreSpec([DeviceSpec([grid], sms, sm_count=_SMS)], [CUBIN])


def _diverged(error: int | None) -> WarpSpec:
    pcs = [COPY + 0x40] * 16 + [COPY + 0x80] * 16
    return WarpSpec(5, pcs, error=error, failed=dict.fromkeys(ALL, 14), active=0xFFFF0000)


_COPIES = GridSpec(9, COPY, (2, 1, 1), (64, 1, 1))
_BLOCK_FAULT = [WarpSpec(n, [COPY + 0x20] * 32, error=COPY + 0x18, failed=dict.fromkeys(ALL, 5)) for n in range(2)]

CORES = {
    "a kernel that hangs": _hung(),
    "an exception of one thread": _core([WarpSpec(3, [SPIN + 0x110] * 32, failed={9: 1})]),
    "an exception of a block": _core(_BLOCK_FAULT, _COPIES),
    "a diverged warp that failed at one place": _core([_diverged(COPY + 0x20)], _COPIES),
    "a diverged warp that failed without a place": _core([_diverged(None)], _COPIES),
    "rows of threads that there are not": _core([WarpSpec(3, [SPIN + 0x110] * 8, valid=0x0F, failed={6: 14})]),
    "threads in the middle of a warp": _core([WarpSpec(3, [SPIN + lane for lane in ALL], valid=0x00FF00F0)]),
    "two GPUs": _two_gpus(),
    "two kernels and a partial warp": _two_kernels(),
    "a kernel without warps": CoreSpec([DeviceSpec([GridSpec(7, SPIN)], [SmSpec(0)], sm_count=1)], [CUBIN]),
    "an exception of an SM beside warps": CoreSpec(
        [
            DeviceSpec(
                [GridSpec(7, SPIN)],
                [SmSpec(0, [BlockSpec(7, warps=[WarpSpec(3, [SPIN + 8] * 32)])]), SmSpec(1, (), 10, COPY + 0x40)],
                sm_count=2,
            )
        ],
        [CUBIN],
    ),
    "symbols relative to their sections": _hung(relative=True),
    "rows that grew": _hung(grown=8),
    "rows of an older driver": _hung(old=True),
    "many sections": _hung(many_sections=True),
    "a function in no cubin": _core([WarpSpec(3, [SPIN + 0x900] * 32)]),
    "a GPU full of warps": _whole_gpu(),
    "every exception": _core(
        [WarpSpec(code, [SPIN + code] * 32, failed={0: code}) for code in range(1, 38)],
    ),
}
