"""Where the optimizer's state is between steps: on the device, or in the memory of its host.

``optimizer``: in host memory. In a step it passes through the device in chunks: while one is
updated there, the next arrives and the one before goes back (the streams of ZeRO-Infinity,
Rajbhandari et al. 2021, section 6.2, with the update on the device). Price, memory and runtime
read the size of a chunk here.
"""

OFFLOAD = ("none", "optimizer")
"""What `Stage.offload` may be."""
CHUNK_BYTES = 1 << 25
"""Of parameters, whose state passes as one chunk; larger parameters are cut."""
CHUNKS = 2
"""On the device at once."""
