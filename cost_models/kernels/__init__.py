"""Times and memory of single kernels, each a formula of its shape, its device and few constants."""
