"""The operators in NumPy, for arrays in host memory; each fills what its caller allocated."""
