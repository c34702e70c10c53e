"""What happens to one saved tensor. Knows no model, no planner and no report: it is handed a plan and a bus."""

from ebbtide.engine.build import NodeView as NodeView
from ebbtide.engine.build import Rule as Rule
from ebbtide.engine.engine import Engine as Engine
from ebbtide.engine.passes import Block as Block
from ebbtide.engine.stats import Stats as Stats
from ebbtide.engine.tickets import Expr as Expr
