"""What a person may say of a search beside model, cluster and pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.nouns.cluster import Cluster
from autopar.nouns.imbalance import Imbalance
from autopar.nouns.style import Style
from autopar.nouns.workload import Framework


@dataclass(frozen=True, slots=True)
class Options:
    """``replicated``: op kinds without a rule that the user lets run whole on every device.

    ``profile``: a database of `autopar profile` whose measured times replace the built-in ones;
    where it was measured with other ``libraries`` of the framework or on another ``processor``,
    progress says so. ``at_hand``: gives one of this machine where none is named, None for another.
    ``style``: how the program is to execute; None: as its framework does by itself.
    ``styles``: where any of several may be, of which the fastest is taken, in the place of it.
    ``imbalance``: of routes to experts; None: as the profile has it, else they are even.
    ``verbose``: progress tells every step of every search.
    """

    searcher: str = "portfolio"
    replicated: tuple[str, ...] = ()
    profile: str | None = None
    at_hand: Callable[[Cluster, Framework], str | None] = lambda cluster, framework: None
    libraries: Callable[[Framework], str | None] = lambda framework: None
    processor: str | None = None
    style: Style | None = None
    styles: tuple[Style, ...] = ()
    imbalance: Imbalance | None = None
    verbose: bool = False
