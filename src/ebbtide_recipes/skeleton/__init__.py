"""What every recipe shares: flags, launch, sharding, checkpoints, resume, steps, log and run file."""
