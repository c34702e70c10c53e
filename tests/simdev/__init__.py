"""A simulated accelerator that torch takes for a real one: ``pytest --simdev`` runs ``tests/gpu`` on it.

[Note: the simulated device]
A PrivateUse1 backend in C++ (``csrc``), built on first use, with the CPU's kernels: streams are threads, copies take as
long as a test sets, freed memory is reused at once and poisoned, and every access of memory is checked for its order.
So code that forgets a wait, drops a source too early or reads too soon computes different bits, or is reported as a
race, on a machine without an accelerator. A process that has loaded it has an accelerator until it ends: it is never
loaded in the processes of the other tests.

Limits: no timing model of a real device (copies and kernels take the CPU's time plus the configured delays), one
device, no ``fork``, no fused attention; a racing host write to pinned memory is not detected.
"""
