"""Profiles that plans are made from: measured, simulated with fake tensors, and the hardware's own rates."""
