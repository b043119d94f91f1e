from __future__ import annotations

from sglang_crashkit.capture.debugger import parse_kernels, parse_stacks
from sglang_crashkit.model.sample import Frame

STACKS = """
[New LWP 8784]
[Thread debugging using libthread_db enabled]
__GI___clock_nanosleep (clock_id=...) at ../sysdeps/unix/sysv/linux/clock_nanosleep.c:71
71\t../sysdeps/unix/sysv/linux/clock_nanosleep.c: No such file or directory.

== thread apply all bt

Thread 2 (Thread 0x7f9043fff6c0 (LWP 8784) "pt_gloo_runloop"):
#0  futex_wake (private=...) at ../sysdeps/nptl/futex-internal.h:209
#1  0x00007f91bef01d3e in c10d::ProcessGroupGloo::broadcast(std::vector<at::Tensor, std::allocator<at::Tensor> >&) () \
from /lib/libtorch_cpu.so
#2  0x0000000000000000 in ?? ()

Thread 1 (LWP 7359 "sglang::schedul"):
#0  <signal handler called>
#1  main ()
[Inferior 1 (process 7359) detached]
"""
KERNELS = """
  Kernel Parent Dev Grid Status                 SMs Mask     GridDim  BlockDim Invocation
*      0      -   0   27 Active 0x00000000000000ffffffff (132,1,1) (640,1,1) ncclDevKernel_AllReduce_Sum_f32(args=...)
       1      -   0   28 Active 0x00000000000000ffffffff  (32,1,1) (128,1,1) void flash_fwd_kernel<128, true>(p=0x7f)
       2      -   1   28 Active 0x00000000000000ffffffff  (32,1,1) (128,1,1) void flash_fwd_kernel<128, true>(p=0x80)
       3      -   1   29 Active 0x00000000000000ffffffff (32,1,1) (128,1,1) void (anonymous namespace)::topk<4>(p=(a=1))
       4      -   1   30 Active 0x00ffffff (240,1,1) (128,1,1) acos_main parms=...

== thread apply all bt
"""


def test_stacks_are_read_thread_by_thread_innermost_first() -> None:
    second, first = parse_stacks(STACKS)
    assert (second.native_id, second.name) == (8784, "pt_gloo_runloop")
    assert second.frames == (
        Frame("futex_wake", "../sysdeps/nptl/futex-internal.h", 209),
        Frame(
            "c10d::ProcessGroupGloo::broadcast(std::vector<at::Tensor, std::allocator<at::Tensor> >&)",
            "/lib/libtorch_cpu.so",
            0,
        ),
        Frame("??", "", 0),
    )
    assert (first.native_id, first.name) == (7359, "sglang::schedul")
    assert first.frames == (Frame("<signal handler called>", "", 0), Frame("main", "", 0))


def test_a_stack_that_breaks_off_is_read_up_to_there() -> None:
    (thread,) = parse_stacks('Thread 1 (Thread 0x7f (LWP 5) "x"):\n#0  one () at a.c:1\n#1  0x')
    assert [frame.function for frame in thread.frames] == ["one", "0x"]


def test_what_is_no_listing_holds_nothing() -> None:
    assert parse_stacks("ptrace: Operation not permitted.\n#0  in a message") == ()
    assert parse_kernels("No CUDA kernels.\n") == ()
    assert parse_kernels(STACKS) == ()


def test_kernels_are_named_once_without_the_values_of_their_arguments() -> None:
    assert parse_kernels(KERNELS) == (
        *("ncclDevKernel_AllReduce_Sum_f32", "void flash_fwd_kernel<128, true>"),
        *("void (anonymous namespace)::topk<4>", "acos_main"),
    )
