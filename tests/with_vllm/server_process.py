"""An OpenAI server of vLLM with its command line, in a process that has vLLM already; for `with_vllm.servers`.

The process that all servers are forked from imports this module. Knows nothing of what is served.
"""

from __future__ import annotations

import os
import sys

import uvloop  # noqa: F401 - this and the next are what the first server would import by itself
import vllm.v1.engine.async_llm  # noqa: F401
from vllm.entrypoints.launchers.api_server import entry


def main(arguments):
    """What `python -m vllm.entrypoints.openai.api_server` does with these arguments, in a session of its own."""
    os.setsid()
    sys.argv = ["api_server", *arguments]
    entry.main()
