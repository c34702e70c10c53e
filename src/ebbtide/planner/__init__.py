"""Choosing the action of every storage: arithmetic on plain values, no tensors."""

from ebbtide.planner.policies import plan_for as plan_for
from ebbtide.planner.table import TablePlan as TablePlan
from ebbtide.planner.table import load_plan as load_plan
