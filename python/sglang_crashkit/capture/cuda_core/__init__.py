"""GPU cores: asked for and awaited (`trigger`), and read by NVIDIA's cuda-gdb (`reading`)."""
