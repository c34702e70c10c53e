"""Training recipes: a config and a main each. Imported by their users; nothing below imports them."""
