"""The common part of all recipes: flags, launch, sharding, checkpoints, resume, steps, log and run file."""
