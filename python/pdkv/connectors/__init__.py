"""Connectors that plug pdkv into LLM engines. Importing this package imports none of them."""
