"""Words everyone shares: errors, units, sites, actions, events."""
