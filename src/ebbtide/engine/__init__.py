"""The life of a saved tensor. Independent of model, planner and report: it receives a plan and a bus."""

from ebbtide.engine.build import NodeView as NodeView
from ebbtide.engine.build import Rule as Rule
from ebbtide.engine.engine import Engine as Engine
from ebbtide.engine.passes import Block as Block
from ebbtide.engine.stats import Stats as Stats
from ebbtide.engine.tickets import Expr as Expr
