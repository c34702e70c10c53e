"""The tests of ebbtide: one folder a tier, and the helpers they share."""
