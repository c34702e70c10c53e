"""Trained weights as files: unchanged for resuming, and at the end in diffusers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ebbtide.base.errors import DataError
from ebbtide_recipes.video.distill import Distillation
from ebbtide_recipes.video.objective import Denoiser

TRAINED = "trained.safetensors"
_WEIGHTS = "diffusion_pytorch_model.safetensors"


def save_trained(module: Denoiser, folder: Path) -> None:
    """Write the trained parameters, under their names in the module, into a checkpoint."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: p.detach().contiguous() for name, p in module.named_parameters() if p.requires_grad}
    save_file(trained, folder / TRAINED)


def load_trained(module: Denoiser, folder: Path) -> None:
    """Read the parameters that ``save_trained`` wrote.

    Raises:
        DataError: They are not those of this module.
    """
    from safetensors.torch import load_file

    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = load_file(folder / TRAINED)
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    if shapes != {name: tuple(p.shape) for name, p in trained.items()}:
        raise DataError(
            f"{folder} holds {len(found)} trained weights that are not this model's",
            expected=f"the {len(trained)} weights that are trained here",
            hint="resume with the --model, --distill and --lora_rank of the run that wrote it",
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(found[name])


def save(module: Denoiser, state: dict[str, torch.Tensor], folder: Path, name: str, *, pipeline: str) -> None:
    """Write the trained transformer or its adapters in diffusers' format; in distillation the critic, too.

    Args:
        module: What was trained.
        state: Its weights, gathered from all processes.
        folder: The output folder.
        name: Name of the transformer's folder.
        pipeline: Class of diffusers' pipeline, whose format adapters have.
    """
    if hasattr(module.transformer, "peft_config"):
        place = folder if name == "transformer" else folder / "lora_ema"
        _save_adapters(module.transformer, _of_part(state, "transformer"), place, pipeline)
        return
    _save_part(module.transformer, _of_part(state, "transformer"), folder / name)
    if isinstance(module, Distillation) and name == "transformer":
        _save_part(module.critic, _of_part(state, "critic"), folder / "critic")


def _save_part(part: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part.save_config(folder)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / _WEIGHTS, metadata={"format": "pt"})


def _save_adapters(transformer: Any, state: dict[str, torch.Tensor], folder: Path, pipeline: str) -> None:
    """Write adapters where the pipeline's ``load_lora_weights`` finds them."""
    import diffusers
    from peft import get_peft_model_state_dict

    layers = get_peft_model_state_dict(transformer, state_dict=state)
    layers = {key: value.contiguous() for key, value in layers.items()}
    # Without the settings a pipeline would take the rank for lora_alpha.
    settings = transformer.peft_config["default"].to_dict()
    getattr(diffusers, pipeline).save_lora_weights(
        folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=settings
    )


def _of_part(state: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{part}."): value for key, value in state.items() if key.startswith(f"{part}.")}
