"""The CPU kernels: one C++ file, its build, and the door to it."""
