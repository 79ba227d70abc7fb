"""Solvers of the sharding problem: one algorithm a file, one signature, answers with bounds.

from autopar.searchers import Budget, search
solution = search(problem, searcher="portfolio", budget=Budget(wall_s=10), seed=0)
"""

from autopar.searchers.registry import SEARCHERS, Searcher, search
from autopar.searchers.run import Budget, Progress

__all__ = ["SEARCHERS", "Budget", "Progress", "Searcher", "search"]
