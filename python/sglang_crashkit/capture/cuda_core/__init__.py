"""Read a core that the CUDA driver wrote, without cuda-gdb: which kernels ran, where, and what failed."""
