"""Tests that need torch, and those of vLLM 0.8's face that need its own classes. `make test-torch` runs them."""
