"""The six stages of a DDTree step: each a NumPy reference, a CUDA kernel and its launcher."""
