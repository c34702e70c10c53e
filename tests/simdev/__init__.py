"""A simulated accelerator that torch takes for a real one: ``pytest --simdev`` runs ``tests/gpu`` on it.

[Note: the simulated device]
A PrivateUse1 backend in C++ (``csrc``), built on first use, with the CPU's kernels: streams are threads, copies take as
long as a test asks for, freed memory is used again at once and poisoned, and every access of memory is checked for its
order. So code that forgets a wait, drops a source too early or reads too soon computes other bits, or is reported as a
race, on a machine without an accelerator. A process that has loaded it has an accelerator until it ends: it is never
loaded in the processes of the other tests.

What it is not: no timing model of a real device (copies and kernels take the CPU's time and the delays asked for), one
device, no ``fork``, no fused attention; a race of a host write to pinned memory is not seen.
"""
