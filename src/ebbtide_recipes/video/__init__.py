"""Flow-matching fine-tuning and distillation of diffusers' video transformers."""
