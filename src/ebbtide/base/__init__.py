"""Definitions that all packages share: errors, units, sites, actions, events."""
