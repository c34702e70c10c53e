"""Choosing the action of every storage: arithmetic on plain values, no tensors."""

from ebbtide.planner.rules import plan_for as plan_for
