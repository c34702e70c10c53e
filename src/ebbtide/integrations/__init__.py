"""One module a host framework: ebbtide's public names and that host, nothing else. Nobody but users imports them."""
