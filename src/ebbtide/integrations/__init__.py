"""One module per host framework. Only users import it, so that a host need not be installed."""
