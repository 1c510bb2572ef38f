"""SplitMix64: turns numbers into random ones, a whole uint64 array at a time.

Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014;
https://prng.di.unimi.it/splitmix64.c.
"""

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # the generator's increment


def finalize(x: np.ndarray) -> np.ndarray:
    """The generator's finalizer; a bijection of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(x: np.ndarray) -> np.ndarray:
    """Random uint64 as float64, evenly spread over [0, 1)."""
    return (x >> np.uint64(11)) * 2.0**-53
