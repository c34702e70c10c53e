"""Frozen weights that stay as they are while TRL merges adapters into them for vLLM.

[Note: merged and restored]
vLLM gets the weights with the adapters added. PEFT adds them in place and subtracts them afterwards; each of the two
rounds, in bfloat16 by up to 0.4 %. Over hundreds of rollouts the base, and with it the reference and the model that the
saved adapters belong to, would drift away. So the frozen weights (of a shard, under FSDP2) are copied to host memory
once and written back after each merge.
"""

from __future__ import annotations

import torch

from ebbtide_recipes.skeleton.trainer import local


class FrozenWeights:
    """Host copies of the frozen weights of adapted layers. See [Note: merged and restored].

    Args:
        model: With adapters of PEFT; others have nothing to keep.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers: dict[torch.nn.Module, None] = {}
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                layers[module.get_base_layer()] = None
        self._kept = [
            (layer, name, parameter, None if _in_4_bits(parameter) else local(parameter.detach()).to("cpu", copy=True))
            for layer in layers
            for name, parameter in layer.named_parameters(recurse=False)
            if not parameter.requires_grad
        ]

    def restore(self) -> None:
        """Write the copies back. A weight in 4 bits is another object after a merge: the first one returns."""
        for layer, name, parameter, copy in self._kept:
            layer.register_parameter(name, parameter)
            if copy is None:
                parameter.bnb_quantized = True  # PEFT's merge takes it away
            else:
                local(parameter.detach()).copy_(copy)


def _in_4_bits(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "bnb_quantized")
