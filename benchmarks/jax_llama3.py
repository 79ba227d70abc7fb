"""Llama 3 8B in JAX as slices of TPUs train it, a sample of 4,096 tokens for each device.

autopar plan benchmarks/jax_llama3.py:on_16 -c examples/clusters/tpu_v5e_16.yaml --compile
"""

from __future__ import annotations

from benchmarks.jax_models import llama3_8b

LENGTH = 4096

on_16 = llama3_8b(samples=16, length=LENGTH, precision="bfloat16")
on_64 = llama3_8b(samples=64, length=LENGTH, precision="bfloat16")
on_256 = llama3_8b(samples=256, length=LENGTH, precision="bfloat16")
