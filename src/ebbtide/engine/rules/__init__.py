"""The rule table: how the value behind an autograd node is recomputed.

[Note: rules]
A rule is declared, or takes a ``NodeView``, and returns an ``Expr``, or None if an operand is unavailable. Most are
declared (``ebbtide.engine.declared``): what they read is remembered. It must call the operator that made the value, on
operands of the same dtype and layout, so that the result is bitwise equal; the first recompute at every site is
compared with the real tensor, and a site that differs is demoted. Operators that draw random numbers have no rule
(dropout's result is recomputed from its saved mask). Numbers that autograd does not keep (``x + 1``,
``masked_fill(mask, -inf)``) are unavailable. The table covers the saved tensors counted over model families
(``benchmarks/suites/families.py``); a new rule needs a line in ``elements``, ``shapes`` or ``layers`` and a case in
``tests/unit/engine/test_rules.py``.
"""

from ebbtide.base.checks import check_value
from ebbtide.base.errors import ConfigError
from ebbtide.engine.build import Rule
from ebbtide.engine.rules import elements, layers, shapes


def rule_table() -> dict[str, Rule]:
    """Return a new table from node name to rule."""
    return {
        **elements.arithmetic(),
        **elements.functions(),
        **elements.reductions(),
        **shapes.views(),
        **shapes.copies(),
        **layers.products(),
        **layers.norms(),
    }


def check_rule(name: str, rule: object) -> None:
    """Check a rule of the user's and the name of its node.

    Raises:
        ConfigError: The name is not a string, or the rule is not callable.
    """
    guide = "docs/guides/custom-operators.md shows a rule"
    check_value("name", name, str, advice=f"tensor.grad_fn.name() returns it; {guide}")
    if not name.strip():
        raise ConfigError("name is empty", expected="a node's name", hint=f"see tensor.grad_fn.name(); {guide}")
    if not callable(rule):
        raise ConfigError(f"rule is a {type(rule).__name__}", expected="a function of a NodeView", hint=guide)
