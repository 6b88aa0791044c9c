"""The cached pass as one call into a C++ library, for x86-64 CPUs with AVX2 or AVX-512.

`native.h` is the interface, `native.cpp` compiles the kernels (`*.inc`) once for each instruction set, and
`library.py`, `linear.py` and `engine.py` are the Python side. The library is built when the package is installed, if
there is a C++ compiler; without it the same calls run in PyTorch.
"""
