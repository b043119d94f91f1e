"""Read a core that the CUDA driver wrote, without cuda-gdb: which kernels ran, where, and what failed.

::

    core_file  the file, its sections and the rows of its tables, read within limits
    symbols    whose function an address is, from the cubins in the core
    reading    all of it together: `reading.read_cuda_core`; `reading.CoreReader` for who must not be held up
    model      what comes out
    text       it in words

The format is documented in NVIDIA's ``cudacoredump.h`` (CUDA toolkit, ``extras/Debugger/include``), the codes in
``cudadebugger.h`` beside it.
"""
