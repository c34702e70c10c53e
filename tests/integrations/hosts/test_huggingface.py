"""The trainers of transformers and TRL, PEFT's adapters, accelerate's loop and the loop of diffusers' examples."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.integrations.transformers import OffloadCallback
from tests.helpers.hosts import STEPS, Trained, batch, check_bitwise, enabled, seeded, trained

# TRL names its own experiments once a process, and asks for functions under names that later versions change.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(experimental|deprecated|will change).*"),
]

CALL = "w1 w2 what does this function do w3"
TEXTS = [f"{CALL} {'it returns the value ' * (2 + i % 3)}" for i in range(4 * STEPS)]


def pairs(**columns: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


def train(
    name: str, model_path: Path, folder: Path, options: dict[str, Any] | None, *, lora: bool = False, **changes: Any
) -> Trained:
    """Train with a trainer of TRL, or of transformers, with its defaults except checkpointing."""
    import transformers
    import trl
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    seeded()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rewards = name == "Reward"
    model = (
        AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
        if rewards
        else AutoModelForCausalLM.from_pretrained(model_path)
    )
    values = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "use_cpu": True, "seed": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "bf16": False,
        "dataloader_pin_memory": False, "gradient_checkpointing": False, "learning_rate": 1e-3, **changes,
    }  # fmt: skip
    callback = None if options is None else OffloadCallback(**options)
    given: dict[str, Any] = {"callbacks": [] if callback is None else [callback]}
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    if name == "Trainer":
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 60, (4 * STEPS, 48)).tolist()]
        trainer: Any = transformers.Trainer(
            model=model, args=transformers.TrainingArguments(**values), train_dataset=rows, **given
        )
    else:
        made = getattr(trl, name + "Trainer"), getattr(trl, name + "Config")
        if name in ("GRPO", "RLOO"):
            values |= {"num_generations": 2, "max_completion_length": 24, "beta": 0.1, "num_iterations": 2}
            given["reward_funcs"] = lambda completions, **_: [float(len(set(text)) % 7) for text in completions]
        trainer = made[0](model=model, args=made[1](**values), train_dataset=rows_of(name), processing_class=tokenizer,
                          **given)  # fmt: skip
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trained(logged, trainer.model, None if callback is None else callback.handle)


def rows_of(name: str) -> Any:
    if name == "SFT":
        return pairs(text=TEXTS)
    prompts = [f"{CALL} w{i}" for i in range(len(TEXTS))]
    if name in ("GRPO", "RLOO"):
        return pairs(prompt=prompts)
    if name == "KTO":
        return pairs(prompt=prompts, completion=TEXTS, label=[i % 2 == 0 for i in range(len(TEXTS))])
    return pairs(prompt=prompts, chosen=TEXTS, rejected=[text[::-1] for text in TEXTS])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Trainer", {"gradient_accumulation_steps": 2}),
        ("SFT", {}),
        pytest.param("SFT", {"packing": True, "max_length": 64}, marks=pytest.mark.slow),
        pytest.param("SFT", {"lora": True}, marks=pytest.mark.slow),
        *(pytest.param(n, {}, marks=pytest.mark.slow) for n in ("DPO", "KTO", "Reward", "GRPO", "RLOO")),
    ],
)
def test_a_trainer_is_bitwise_the_same(name: str, changes: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    check_bitwise(functools.partial(train, name, tiny_model, tmp_path, **changes))


def test_trls_default_of_checkpointing_is_named_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train("SFT", tiny_model, tmp_path, {"min_bytes": 0}, gradient_checkpointing=True, max_steps=2)
    named = [message for message in caplog.messages if "itself checkpoints blocks" in message]
    assert len(named) == 1 and "gradient_checkpointing=False" in named[0]
    caplog.clear()
    train("SFT", tiny_model, tmp_path, {"min_bytes": 0}, max_steps=2)
    assert not any("itself checkpoints blocks" in message for message in caplog.messages)


def test_accelerates_loop_is_bitwise_the_same(tiny_model: Path) -> None:
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    def run(options: dict[str, Any] | None) -> Trained:
        seeded()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        handle, losses = enabled(model, options), []
        for _ in range(2 * STEPS):
            tokens = torch.randint(1, 60, (2, 48))
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        if handle is not None:
            handle.close()
        return trained(losses, model, handle)

    check_bitwise(run)


@pytest.mark.parametrize("family", [pytest.param("UNet", marks=pytest.mark.slow), "SD3"])
def test_the_loop_of_diffusers_examples_is_bitwise_the_same(family: str) -> None:
    from accelerate import Accelerator
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_scheduler

    from tests.helpers.models import build

    def run(options: dict[str, Any] | None) -> Trained:
        seeded()
        accelerator = Accelerator(cpu=True)
        tiny = build({"UNet": "unet2d_condition", "SD3": "sd3"}[family])
        model: nn.Module = tiny.model
        noising = DDPMScheduler(num_train_timesteps=1000)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=2)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        handle, losses = enabled(model, options), []
        name = "sample" if "sample" in tiny.inputs else "hidden_states"
        shape = tiny.inputs[name].shape
        for step in range(STEPS):
            latents, noise = batch(step, *shape), torch.randn(*shape)
            times = torch.randint(0, 1000, (shape[0],))
            inputs = {**tiny.inputs, name: noising.add_noise(latents, noise, times), "timestep": times}
            prediction = model(**inputs, return_dict=False)[0]
            loss = nn.functional.mse_loss(prediction.float(), noise.float())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss)
        if handle is not None:
            handle.close()
        return trained(losses, model, handle)

    check_bitwise(run)


def test_other_bits_are_found() -> None:
    one = trained([torch.tensor(0.0), 1.0, 2.0, 3.0], nn.Linear(1, 1), None)
    other = Trained(losses=[torch.tensor(-0.0), *one.losses[1:]], parameters=dict(one.parameters))
    other.parameters["bias"] = other.parameters["bias"] + 1e-7
    from tests.helpers.hosts import differences

    assert differences(one, other) == ["loss of step 1", "bias"]
    with pytest.raises(AssertionError, match="without a trend"):
        check_bitwise(lambda options: trained([1.0] * STEPS, nn.Linear(1, 1), None))
    with pytest.raises(AssertionError, match="auto"):
        check_bitwise(lambda options: trained(range(STEPS), nn.Linear(1, 1), None))
