"""What several tiers need: tiny models, the oracle, the spawn helper."""
