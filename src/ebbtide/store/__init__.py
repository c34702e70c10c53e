"""Where bytes wait: the disk tier, the host tier, and the devices they serve."""
