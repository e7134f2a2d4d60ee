"""Processes that are forked from one which has imported vLLM already, once for all engines and servers of these tests.

Imports nothing heavy itself, so that whoever runs the tests can. Knows neither engines nor servers.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback

from with_vllm import settings


def start(name, module, arguments, *, environment, log):
    """Starts a process that writes what it says to `log` and calls `main` of the module with the arguments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["with_vllm.engine_process", "with_vllm.server_process"])
    variables = settings.ENVIRONMENT | settings.IN_PROCESS | environment
    process = context.Process(target=_begin, args=(module, arguments, variables, str(log)), name=name)
    # The process that others are forked from takes its environment when the first one is.
    saved = dict(os.environ)
    os.environ.update(variables)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(saved)
    return process


def _begin(module, arguments, environment, log):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    try:
        _fork_workers()
        importlib.import_module(module).main(*arguments)
    except EOFError:
        os._exit(0)  # the tests are gone; nobody waits for an orderly end
    except BaseException:
        traceback.print_exc()
        raise


def _fork_workers():
    """Has vLLM fork its own processes too, as with GPUs; with CPUs it would have each of them import it anew."""
    from vllm.platforms import current_platform

    choose = current_platform.check_and_update_config

    def chosen(config):
        choose(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    current_platform.check_and_update_config = chosen
