"""Training in the real packages: one file a host, each compared bitwise with the same training without ebbtide."""
