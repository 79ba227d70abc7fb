"""What `autopar plan` measures by itself of the CPU cores at hand for a model of JAX: a few seconds
of a profile, by the means of `worker`."""

from __future__ import annotations

from autopar.runtime.profile.cases import least_cases, middle_cases
from autopar.runtime.profile.jax.bench import Bench
from autopar.runtime.profile.jax.worker import (
    begun,
    measure_case,
    measure_collectives,
    measure_process,
    measure_updates,
)
from autopar.runtime.profile.quick_sizes import (
    CHAIN_BYTES,
    ENOUGH_S,
    FEWEST,
    LARGEST,
    SIZES,
    UPDATES,
)


def main() -> None:
    bench = Bench(*begun(), ENOUGH_S, FEWEST)
    measure_process(bench)
    for case in least_cases():
        measure_case(bench, case, "float32", CHAIN_BYTES)
    for case in middle_cases(LARGEST):
        measure_case(bench, case, "float32", CHAIN_BYTES)
        if case.kind in ("linear", "attention"):
            measure_case(bench, case, "bfloat16", CHAIN_BYTES)
    measure_updates(bench, UPDATES)
    measure_collectives(bench, SIZES)


if __name__ == "__main__":
    main()
