"""Log-probabilities of a batch without padding: its sequences concatenated into one row.

[Note: sequences in one row]
The row has no attention mask; its position ids restart with every sequence, by which transformers' attention separates
them (``find_packed_sequence_indices``; checked with transformers 5.23): with a mask, or with flash attention by their
lengths. A model that ignores positions, such as one with a recurrent state, would mix them without an error.
``separates`` tests this without a tolerance: other tokens in the first sequence must leave the second one's
log-probabilities bitwise unchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from ebbtide_recipes.grpo.dropout import without_dropout


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
    mask = torch.ones(2, 6, dtype=torch.long, device=device)
    seen: list[torch.Tensor] = []
    with torch.no_grad(), without_dropout(model):
        for first in ([2, 3, 4, 5, 6, 7], [7, 9, 8, 3, 2, 4]):
            ids = torch.tensor([first, [2, 4, 6, 8, 3, 5]], device=device)
            output = model(**rows_to_one(ids, mask, 5), fused_lm_head=True)
            seen.append(one_to_rows(output.log_probs, mask, 5))
    moved = not torch.equal(seen[0][0], seen[1][0])
    return moved and torch.equal(seen[0][1], seen[1][1])
