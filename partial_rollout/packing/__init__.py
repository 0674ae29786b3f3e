"""Which samples train together: planners, what a row costs, and how even a plan is. Decides; touches no tensor."""

from __future__ import annotations

from partial_rollout.packing.plan import CostModel, Plan, PlanStatistics, imbalance, plan_statistics
from partial_rollout.packing.planners import (
    GlobalPlanner,
    PaddedPlanner,
    Planner,
)

__all__ = [
    "CostModel",
    "GlobalPlanner",
    "PaddedPlanner",
    "Plan",
    "PlanStatistics",
    "Planner",
    "imbalance",
    "plan_statistics",
]
