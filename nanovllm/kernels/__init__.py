"""Triton kernels, one subject a file. Imported on CUDA only (or under Triton's interpreter).

Shapes and strides that vary from step to step are `do_not_specialize`, so that nothing is compiled
after construction; addresses into the K/V pool are 64 bits wide.
"""
