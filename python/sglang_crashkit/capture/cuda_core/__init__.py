"""GPU cores: request one and wait for it (`trigger`), and read it with NVIDIA's cuda-gdb (`reading`)."""
