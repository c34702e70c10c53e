"""Log-probabilities of a batch without padding: its sequences concatenated into one row.

[Note: sequences in one row]
The row has no attention mask; its position ids restart with every sequence, by which transformers' attention separates
them (``find_packed_sequence_indices``; checked with transformers 5.23): with a mask, or with flash attention by their
lengths. A model that ignores positions, such as one with a recurrent state, would mix them without an error.
``separates`` tests this: other tokens in a sequence must not change the log-probabilities of the one after it by more
than those of the one before it, which no model of the past can mix with them. The latter change is zero, and the test
is bitwise, unless the model has experts: the row's tokens share them, and products of other sizes are rounded
differently.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from ebbtide_recipes.skeleton.dropout import without_dropout

ROUNDINGS = 8
"""How much more than a sequence before it one after it may change. With experts of Qwen3 both changed equally."""


def rows_to_one(input_ids: torch.Tensor, attention_mask: torch.Tensor, keep: int) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a batch without its padding.

    Args:
        input_ids: ``[B, S]``, padded on either side.
        attention_mask: ``[B, S]``, 1 for tokens and 0 for padding.
        keep: Number of scored positions at the end of a row.

    Returns:
        ``input_ids``, ``position_ids`` and ``shift_labels``, each ``[1, T]`` with ``T`` tokens.
    """
    present = attention_mask.bool()
    following = input_ids.roll(-1, dims=1)
    scored = present & present.roll(-1, dims=1)
    scored[:, -1] = False
    scored[:, : -keep - 1] = False
    positions = attention_mask.cumsum(dim=1) - 1
    return {
        "input_ids": input_ids[present][None],
        "position_ids": positions[present][None],
        "shift_labels": following.masked_fill(~scored, -100)[present][None],
    }


def one_to_rows(values: torch.Tensor, attention_mask: torch.Tensor, keep: int) -> torch.Tensor:
    """Return the values of one row as a batch.

    Args:
        values: ``[1, T]``; the value at a token belongs to the token after it.
        attention_mask: ``[B, S]``, as ``rows_to_one`` took it.
        keep: As ``rows_to_one`` took it.

    Returns:
        ``[B, keep]``, zero where there is padding.
    """
    present = attention_mask.bool()
    batch = values.new_zeros(present.shape).masked_scatter(present, values[0])
    return batch[:, -keep - 1 : -1]


def separates(model: Any, device: torch.device) -> bool:
    """Whether a model keeps the sequences of one row apart. See [Note: sequences in one row].

    Args:
        model: With TRL's fused head; every rank calls this at the same time.
        device: Of its inputs.
    """
    fixed, *others = ([2, 4, 6, 8, 3, 5, 9, 7] * 2, [2, 3, 4, 5, 6, 7, 8, 9] * 2, [9, 4, 8, 3, 2, 6, 7, 5] * 2)
    mask = torch.ones(2, len(fixed), dtype=torch.long, device=device)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}  # by the place of the one that stays the same
    with torch.no_grad(), without_dropout(model):
        for place, other in product(seen, others):
            ids = torch.tensor([fixed, other] if place == 0 else [other, fixed], device=device)
            output = model(**rows_to_one(ids, mask, len(fixed) - 1), fused_lm_head=True)
            seen[place].append(one_to_rows(output.log_probs, mask, len(fixed) - 1))
    rounding, change = (float((one[place] - two[place]).abs().max()) for place, (one, two) in seen.items())
    moved = not torch.equal(seen[1][0][0], seen[1][1][0])
    return moved and change <= ROUNDINGS * rounding
