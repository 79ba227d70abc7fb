"""By which all-reduce replicas add up their gradients.

==========  ======================================================================================
library     the communication library's own
two-level   pieces added up inside each domain of the fast links, each piece across domains, and
            put together inside again: a domain sends over the slow links what one rank of it
            would (`autopar.pricing.two_level`)
==========  ======================================================================================

A plan holds the second with the ranks of each domain, ``two-level of 8``: that follows from a
cluster, of which a program knows nothing.
"""

from __future__ import annotations

import re

ALL_REDUCES = LIBRARY, TWO_LEVEL = "library", "two-level"


def two_level_of(inside: int) -> str:
    """The text of a plan whose domains hold ``inside`` ranks of each sum."""
    return f"{TWO_LEVEL} of {inside}"


def ranks_inside(text: str | None) -> int | None:
    """The inverse of `two_level_of`. None: it is no such text."""
    match = re.fullmatch(TWO_LEVEL + r" of ([1-9][0-9]{0,5})", text or "")
    return int(match[1]) if match and int(match[1]) > 1 else None
