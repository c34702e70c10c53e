"""Training in the real packages: one file per host, each compared bitwise with the same training without ebbtide."""
