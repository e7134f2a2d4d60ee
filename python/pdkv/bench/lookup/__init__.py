"""`--mode lookup`: one prompt among many in a lookup buffer, beside a scan of all; and blocks straight into pages.

`prompts` says what is in the buffer, `scan` is what it is compared with, `ends` are the two ends, `measure` measures.
"""
