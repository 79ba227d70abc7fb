"""What each process of a JAX job does in `test_leaving`.

python -m tests.jax.leaving_process <its number> <port> <how the second one ends>
"""

from __future__ import annotations

import os
import sys
from typing import Any


def main(number: int, port: int, end: str) -> None:
    import jax
    import jax.numpy as jnp

    from autopar.runtime.jax.parallel import leave_at_once

    jax.distributed.initialize(f"localhost:{port}", 2, number)
    leave_at_once()
    mesh = jax.make_mesh((2,), ("all",))
    spec = jax.sharding.PartitionSpec("all")

    def summed(x: Any) -> Any:
        return jax.lax.psum(x, "all")

    whole = jax.sharding.PartitionSpec()
    total = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=whole))

    lies = jax.sharding.NamedSharding(mesh, spec)
    x = jax.make_array_from_callback((2,), lies, lambda place: jnp.ones(2)[place])
    for step in range(10):
        print(f"step {step} {float(total(x)[0])}")
        if number == 1 and step == 1:
            if end == "fails":
                raise ValueError("the third batch is empty")
        if end == "leaves" and step == 2:
            return


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
