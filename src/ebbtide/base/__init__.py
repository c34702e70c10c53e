"""Definitions that all rooms share: errors, units, sites, actions, events."""
