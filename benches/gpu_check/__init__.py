"""`make gpu-check`: proves on a GPU what everything else proves without one, and measures it.

One command on a bare machine with a GPU, from a wheel that was carried there: no compiler, no network. Each step is a
process of its own with its own deadline, so that one that hangs costs that step. `DRY=1` runs the same steps on the
stand-in for the driver, with numpy in torch's place: their logic, not their speed.
"""
