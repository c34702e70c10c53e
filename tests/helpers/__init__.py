"""Shared by several tiers: tiny models, the oracle, the spawn helper."""
