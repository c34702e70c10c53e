"""One module per host framework. Each imports only ebbtide's public names and its host; only users import it."""
