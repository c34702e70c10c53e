"""Training recipes: a config and a main each. No lower package imports them."""
