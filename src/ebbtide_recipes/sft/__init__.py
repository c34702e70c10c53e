"""Supervised fine-tuning of a language model on transformers, TRL, PEFT and accelerate."""
