"""`make gpu-check`: proves on a GPU what everything else proves without one, and measures it.

One command on a bare machine with a GPU, from a wheel that was carried there: no compiler, no network. Each step is a
process of its own with its own deadline, so that one that hangs costs that step. `--dry` runs the same steps on the
stand-in for the driver, with numpy in torch's place: their logic, not their speed. `make gpu-check DRY=1` also runs
those that need torch (tests/with_torch/gpu_steps.py).
"""
