"""Every module of PyTorch's own test database as a model (`as_models`), with the settings and
inputs that it has there.

    python -m tests.emit.torch_modules [--only NAME]...
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch

from tests.emit.as_models import STAGES, quietly, tried, workload_of
from tests.emit.torch_ops import database
from tests.outcomes import Outcome, report

INPUTS = 6
"""At most that many of a module."""


@cache
def modules() -> dict[str, Any]:
    """`ModuleInfo` by name."""
    database()  # with the extents of its ops
    import torch.testing._internal.common_modules as made

    return {info.name: info for info in made.module_db}


def outcomes(name: str) -> Iterator[Outcome]:
    info = modules()[name]
    given = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    for number, one in enumerate(given[:INPUTS]):
        if one.forward_input is None or not one.forward_input.args:
            continue
        setting, inputs = one.constructor_input, one.forward_input
        build = partial(_seeded, info.module_cls, setting.args, setting.kwargs)
        if getattr(inputs.args[0], "ndim", 0):
            call = workload_of(build, (inputs.args, inputs.kwargs))
            yield from tried(name, number, call, STAGES[:3])


def _seeded(made: Any, args: Any, kwargs: Any) -> Any:
    torch.manual_seed(0)
    return made(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[])
    quietly()
    report(row for name in parser.parse_args().only or modules() for row in outcomes(name))


if __name__ == "__main__":
    main()
