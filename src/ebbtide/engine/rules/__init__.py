"""The rule table: how the value behind an autograd node is made again.

[Note: rules]
A rule is given a ``NodeView`` and returns an ``Expr``, or None when an operand cannot be had. It must call the very
operator that made the value, on operands of the very dtype and layout, so that the result is equal bit by bit; the
first recompute at every site is compared with the tensor that is there, and a site that differs is demoted. Operators
that draw random numbers have no rule (dropout's result is made again from the mask that it saved). Numbers that
autograd does not keep (``x + 1``, ``masked_fill(mask, -inf)``) cannot be had. The table was made from a census of what
model families save, not by hand (``benchmarks/suites/families.py``); a new rule needs a line in ``elements``,
``shapes`` or ``layers`` and a case in ``tests/unit/engine/test_rules.py``.
"""

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
