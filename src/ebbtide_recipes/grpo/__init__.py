"""`ebbtide grpo`: group relative policy optimisation of a language model, on TRL."""
