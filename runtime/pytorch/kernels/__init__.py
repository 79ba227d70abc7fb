"""Kernels of our own, each beside a plain torch reference of the same signature.

`table.py` says what there is. Nothing here imports triton before a kernel runs (`launch.py`); the
functions that triton compiles stand in `device/`. No kernel writes what it was given: a backward
runs again bit for bit, as split backwards (gradients of inputs, then of weights) and retained
graphs need. Sums over rows are added up in a fixed order, without atomics.
"""
