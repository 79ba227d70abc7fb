"""How many units ahead FSDP2 gathers parameters that are split.

=  ==================================================================================
0  none: a unit is gathered when it is to compute, and one is whole at a time
1  the next one, while a unit computes: FSDP2's own way
2  the next two: where a large unit follows small ones, its gather begins sooner
=  ==================================================================================
"""

from __future__ import annotations

PREFETCHES = NO_UNIT, USUAL, DEEPEST = 0, 1, 2
