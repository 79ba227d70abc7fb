"""Planning: candidates, the sharding search for each, simulation, and the choice."""

from autopar.planner.options import Options
from autopar.planner.planning import PlanResult, plan, plan_captured

__all__ = ["Options", "PlanResult", "plan", "plan_captured"]
