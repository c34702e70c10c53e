"""A script of transformers, PEFT or TRL: ``trainers.py NAME MODEL OUTPUT``."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

name, place, output = sys.argv[1:4]
model = AutoModelForCausalLM.from_pretrained(place)
tokenizer = AutoTokenizer.from_pretrained(place)
common = {
    "output_dir": output, "max_steps": 6, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True,
    "logging_steps": 1, "save_strategy": "no", "seed": 1, "disable_tqdm": True,
}  # fmt: skip
text = "It returns the value of the argument. " * 12
if name == "trainer":
    ids = tokenizer(text, truncation=True, max_length=96)["input_ids"]
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}] * 16)
    trainer = Trainer(model, TrainingArguments(**common), train_dataset=rows)
else:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": text}] * 16)
    config = SFTConfig(**common, max_length=96, gradient_checkpointing=name == "sft-checkpointed")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if name == "sft-lora" else None
    trainer = SFTTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=lora)
trainer.train()
