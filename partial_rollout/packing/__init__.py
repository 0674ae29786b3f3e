"""Which samples train together: planners, what a row costs, and how even a plan is. Decides; touches no tensor."""

from __future__ import annotations

from partial_rollout.packing.plan import CostModel, Plan, PlanStatistics, imbalance, plan_statistics, step_cost
from partial_rollout.packing.planners import (
    FixedCountPlanner,
    GlobalPlanner,
    PaddedPlanner,
    Planner,
    TokenBudgetPlanner,
)

__all__ = [
    "CostModel",
    "FixedCountPlanner",
    "GlobalPlanner",
    "PaddedPlanner",
    "Plan",
    "PlanStatistics",
    "Planner",
    "TokenBudgetPlanner",
    "imbalance",
    "plan_statistics",
    "step_cost",
]
