"""Tests of `pdkv bench`: its decisions with a stand-in engine, then the command itself on the real one."""
