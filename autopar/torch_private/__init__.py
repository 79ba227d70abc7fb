"""Every private name of torch, imported or reached as an attribute: what a new torch may move.

One name a line or a function, with the reason; `tests/agreements/test_imports.py` sees to it that
they stand nowhere else. Names of ops as text are none: graphs, programs and files hold them.
"""

import torch._dynamo  # fake tensors and optimizers import it at first use; here before ranks fork
import torch.distributed._functional_collectives  # noqa: F401  registers ops that `ops` names
