"""As much of NIXL as gpu-check uses; see _api.py."""
