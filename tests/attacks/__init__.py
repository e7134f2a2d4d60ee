"""Attacks on pdkv by real processes: killed, stopped, restarted, lying and flooding peers."""
