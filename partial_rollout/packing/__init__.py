"""Which samples train together: planners, what a row costs, and how even a plan is. Decides; touches no tensor."""

from __future__ import annotations

from partial_rollout.packing.cost import CostModel
from partial_rollout.packing.plan import Plan, PlanStatistics, imbalance, plan_statistics, step_cost
from partial_rollout.packing.planners import FixedCountPlanner, GlobalPlanner, Planner, TokenBudgetPlanner

__all__ = [
    "CostModel",
    "FixedCountPlanner",
    "GlobalPlanner",
    "Plan",
    "PlanStatistics",
    "Planner",
    "TokenBudgetPlanner",
    "imbalance",
    "plan_statistics",
    "step_cost",
]
