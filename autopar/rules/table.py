"""The rules of all built-in kinds, by family. ``block`` has none: its body's ops have theirs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.rules.attention import ATTENTION
from autopar.rules.convolution import CONVOLUTION
from autopar.rules.ctc import CTC
from autopar.rules.elementwise import ELEMENTWISE
from autopar.rules.experts import EXPERTS
from autopar.rules.factories import FACTORIES
from autopar.rules.feed_forward import FEED_FORWARD
from autopar.rules.fourier import FOURIER
from autopar.rules.lax_calls import LAX_CALLS, lax_rule
from autopar.rules.lookups import LOOKUPS
from autopar.rules.normalisation import NORMALISATION
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.products import PRODUCTS
from autopar.rules.reductions import REDUCTIONS
from autopar.rules.torch_calls import TORCH_CALLS
from autopar.rules.views import VIEWS
from autopar.rules.vocabulary import VOCABULARY

TABLE: Mapping[str, Rule | RuleMaker] = MappingProxyType(
    {
        **PRODUCTS,
        **ATTENTION,
        **NORMALISATION,
        **VOCABULARY,
        **CTC,
        **ELEMENTWISE,
        **REDUCTIONS,
        **VIEWS,
        **CONVOLUTION,
        **FACTORIES,
        **FOURIER,
        **LOOKUPS,
        **EXPERTS,
        **FEED_FORWARD,
        **TORCH_CALLS,
        **dict.fromkeys(LAX_CALLS, lax_rule),
    }
)
