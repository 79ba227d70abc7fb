"""How published software runs attention on ranks that share a sequence."""

from __future__ import annotations

from autopar.cost_models.software import Context
from autopar.frontends.family.model import NoGraph
from autopar.nouns.axes import CONTEXT
from autopar.nouns.graph import Op
from autopar.rules.implementations.table import CAUSAL_RING, RING, ZIGZAG_RING
from autopar.rules.notation import BoundRule

HEADS = "g"
"""The factor of attention's rule that is split where ranks trade rows for heads."""


def along_sequence(op: Op, bound: BoundRule, context: Context, cp: int) -> str:
    """What ``cp`` ranks of a sequence do to an attention op, as a strategy says it; nothing where
    they do as the batch flows, which gathers keys and values.

    A ring of causal attention has its rows in zigzag where these can be cut so, which balances its
    ranks' work (Dubey et al. 2024, The Llama 3 herd of models, section 3.3.2).

    Raises:
        NoGraph: attention that no ring can run, or fewer heads than ranks.
    """
    if cp == 1 or context == "gather":
        return ""
    if context == "heads":
        return f"{CONTEXT}:{HEADS}"
    pieces = bound.factors["s"].size % (2 * cp) == 0
    usual = (ZIGZAG_RING if pieces else CAUSAL_RING) if op.attrs.get("causal") else RING
    if bound.rule.implemented(usual) is None:
        raise NoGraph(
            f"{op.name}: attention with dropout does not pass round a ring of cp {cp} ranks; "
            "declare context: gather or heads, or no dropout"
        )
    return f"{CONTEXT}:{usual}"
