"""Numerical tests of the C functions against a float64 reference, on any device."""
