"""What a process with an engine begins with. Imports nothing heavy, so that whoever starts the process can name it."""

from __future__ import annotations

import os
import traceback


def main(pipe, settings, environment, log):
    """Builds an engine from the settings, says so through the pipe, and serves it until the other end closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    try:
        from with_vllm.engine_process import Host

        Host(settings, pipe).run()
    except EOFError:
        os._exit(0)  # the tests are gone; nobody waits for an orderly end
    except BaseException:
        traceback.print_exc()
        raise
