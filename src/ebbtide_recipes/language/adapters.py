"""Adapters by PEFT: LoRA on plain and 4-bit weights, other kinds, and adapters that are continued."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ebbtide.base.errors import ConfigError, DataError, first_line, nearest
from ebbtide.base.extras import check_installed
from ebbtide_recipes.language.adapter_kinds import FILE, config_of, settings_in, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from ebbtide_recipes.language.config import LanguageConfig


def check(config: LanguageConfig) -> None:
    """Reject settings that must fail, before the model is looked up.

    Raises:
        EbbtideError: bitsandbytes is missing for 4 bits.
        ConfigError: There is no such kind of adapter, or a file has an unsupported setting.
        DataError: A file or folder is missing, or cannot be read.
    """
    if config.train_type == "qlora":
        check_installed("bitsandbytes", extra="qlora", use="--train_type qlora")
    _ = config.adapter_kind  # reads its file or folder


def four_bits(config: LanguageConfig, dtype: str) -> dict[str, Any]:
    """Return the config with which ``from_pretrained`` quantises weights while loading.

    Args:
        config: Says whether FSDP shards the weights.
        dtype: Compute type, such as ``"bfloat16"``.
    """
    import torch
    from transformers import BitsAndBytesConfig

    from ebbtide.load.targets import default_device

    computed = getattr(torch, dtype)
    made = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
        # FSDP shards only weights stored in the same type as the others.
        bnb_4bit_quant_storage=computed if config.fsdp_strategy != "none" else torch.uint8,
    )
    return {"quantization_config": made, "device_map": {"": default_device()}}


def chosen(config: LanguageConfig, model: PreTrainedModel, *, without: Sequence[str] = ()) -> PeftConfig:
    """Return the adapters of the config.

    Args:
        config: Names the kind and the modules, or a folder of adapters to continue.
        model: An ``outline`` of the model; the adapters are tried on it.
        without: Paths of modules inside which nothing gets an adapter.

    Raises:
        ConfigError: A name in ``target_modules`` is not a module of the model, or cannot have such an adapter.
        DataError: The adapters of the folder do not fit the model.
    """
    if config.adapters is not None:
        folder = Path(config.adapters).expanduser()
        made = config_of(settings_in(folder), FILE)
        _try(made, model, f"the adapters in {folder}", "the model they were trained on")
        return made
    settings: dict[str, Any] = {"peft_type": "LORA", "r": config.lora_rank, "lora_alpha": config.lora_alpha}
    settings["lora_dropout"] = config.lora_dropout
    if config.train_type == "adapter":
        settings = settings_of(str(config.adapter_config))
    if not {"target_modules", "target_parameters"} & settings.keys():
        norms = settings["peft_type"] == "LN_TUNING" and not config.is_set("target_modules")
        settings["target_modules"] = _norms(model) if norms else _targets(config, model)
    made = config_of({**settings, "task_type": "CAUSAL_LM"}, config.adapter_config or "")
    if without:
        _leave_out(made, model, without)
    _try(made, model, *_named(config, model))
    return made


def put_on(model: PreTrainedModel, made: PeftConfig, config: LanguageConfig) -> PeftModel:
    """Add adapters to a model: new ones, or those of a folder with their values.

    Args:
        model: With its weights, or on meta; see [Note: stand-ins] in ``meta.py``.
        made: As ``chosen`` returned it.
        config: Has the seed of new adapters' values, and names the folder.

    Raises:
        ConfigError: New adapters are computed from the weights, which are not loaded yet.
        DataError: The values in the folder do not fit.
    """
    from peft import PeftModel, get_peft_model
    from safetensors import SafetensorError
    from transformers import set_seed

    from ebbtide_recipes.language.meta import standing_in

    set_seed(config.seed)
    with standing_in(model):
        if config.adapters is None:
            return _in_float32(cast("PeftModel", get_peft_model(model, made)), config)
        folder = str(Path(config.adapters).expanduser())
        try:
            return _in_float32(
                PeftModel.from_pretrained(model, folder, config=made, is_trainable=True, torch_device="cpu"), config
            )
        except (RuntimeError, ValueError, OSError, SafetensorError) as error:
            if isinstance(error, ConfigError):
                raise
            raise DataError(
                f"the adapters in {folder} cannot be loaded: {first_line(error)}",
                expected="adapters that were trained on this model",
                hint="see base_model_name_or_path in their adapter_config.json",
            ) from error


def _in_float32(model: PeftModel, config: LanguageConfig) -> PeftModel:
    """Convert what is trained besides adapters, in mixed precision: copies and biases have the base's type."""
    # accelerate does it under FSDP, which gathers a block's parameters in one piece.
    if config.bf16 and config.fsdp_strategy == "none":
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()
    return model


def _norms(model: PreTrainedModel) -> list[str]:
    """Return the paths of the norms; PEFT knows those of few models, and would copy linear layers as well."""
    kinds = [(name, type(module).__name__.lower(), module) for name, module in model.named_modules()]
    # PEFT's wrapper does not serve gated ones: models read their attributes.
    norms = [(name, module) for name, kind, module in kinds if "norm" in kind and not kind.endswith("gated")]
    return [name for name, module in norms if [*module.parameters(recurse=False)]]


def _leave_out(made: Any, model: PreTrainedModel, without: Sequence[str]) -> None:
    """Keep adapters out of some modules: excluded, or, for kinds that cannot exclude, by naming all other targets."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists

    inside = rf".*(?:{'|'.join(map(re.escape, without))})\..*"
    if hasattr(made, "exclude_modules"):
        theirs = made.exclude_modules
        if theirs and not isinstance(theirs, str):  # PEFT compares the ends of paths with names
            theirs = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, theirs))})"
        made.exclude_modules = f"{theirs}|{inside}" if theirs else inside
        return
    # A copy, as in `_try`.
    named = _maybe_include_all_linear_layers(copy.deepcopy(made), model)
    paths = [name for name, _ in model.named_modules() if check_target_module_exists(named, name)]
    made.target_modules = {name for name in paths if not re.fullmatch(inside, name)}


def _targets(config: LanguageConfig, model: PreTrainedModel) -> str | list[str]:
    """Return the modules that get adapters; all exist in the model."""
    targets = list(config.target_modules)
    known = {part for name, _ in model.named_modules() for part in (name, name.rpartition(".")[2])} - {""}
    for target in targets:
        if target != "all-linear" and target not in known:
            raise ConfigError(
                f"target_modules names {target!r}",
                expected="modules of the model",
                hint=nearest(target, sorted(known)) or "all-linear takes every linear module but the head",
            )
    if "all-linear" in targets and len(targets) > 1:
        raise ConfigError(
            f"target_modules is {' '.join(targets)}",
            expected="either all-linear or names",
            hint="all-linear takes every linear module but the head",
        )
    return "all-linear" if targets == ["all-linear"] else targets


def _named(config: LanguageConfig, model: PreTrainedModel) -> tuple[str, str]:
    """Describe the requested adapters, and the modules that could have them."""
    if config.train_type == "adapter":
        return f"adapters of {config.adapter_config} do not fit the model", "settings that its modules can have"
    targets = set(config.target_modules)
    kinds = {type(m).__name__ for name, m in model.named_modules() if {name, name.rpartition(".")[2]} & targets}
    found = (
        f"target_modules is {' '.join(config.target_modules)}, which names {', '.join(sorted(kinds)) or 'no module'}"
    )
    return found, "modules that can have adapters, such as Linear"


def _try(made: PeftConfig, model: PreTrainedModel, found: str, expected: str) -> None:
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import TrainableTokensWrapper

    try:
        # A copy of the config: PEFT writes the modules it finds into its argument.
        get_peft_model(model, copy.deepcopy(made))
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{found}: {first_line(error)}",
            expected=expected,
            hint="all-linear takes every linear module but the head",
        ) from error
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if isinstance(head, TrainableTokensWrapper):
        raise ConfigError(
            f"the output embeddings, {name}, would have single tokens trained by trainable_token_indices",
            expected="tokens of input embeddings that are not tied to the output embeddings: TRL computes losses from "
            "the latter, and PEFT's replacement lacks the bias that it reads",
            hint="leave trainable_token_indices out",
        )
    if isinstance(head, BaseTunerLayer):
        raise ConfigError(
            f"the output embeddings, {name}, would have adapters",
            expected="other modules: TRL computes losses from the weights of these, so they would not be trained",
            hint="leave them out of target_modules; all-linear does",
        )
