"""Disaggregated prefill with real vLLM, on a CPU and with one command.

Starts an instance of vLLM that prefills, one that decodes, and `pdkv proxy` in front of them; asks the proxy, asks the
decoding instance alone, shows that both answers are the same and how much KV cache was handed over; stops everything.

    .venv-vllm/bin/python examples/vllm_pd/run.py [--model MODEL] [--prompt TEXT]

The environment is made by `make vllm`. Without a model it is SmolLM2-135M, whose weights lie in that environment.
"""

import argparse
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

PROMPT = (
    "Two machines share the work of a language model. The first one reads the question and remembers what it has read "
    "as keys and values. The second one fetches these keys and values, and writes the answer. The advantage is that"
)
NEW_TOKENS = 24

# Instances share this machine's cores, and look nowhere else for anything.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def transfer(role):
    """What goes behind `--kv-transfer-config`. A KV cache that can't be had is computed by the decoding instance."""
    return json.dumps({"kv_connector": "PdkvConnector", "kv_role": role, "kv_load_failure_policy": "recompute"})


def vllm(model, port, role):
    """The command of an instance: `vllm serve` on a machine with a GPU."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "512"]
    return [*command, "--kv-cache-memory-bytes", str(256 << 20), "--kv-transfer-config", transfer(role)]


def proxy(port, prefill_port, decode_port):
    """The command of the proxy."""
    command = [sys.executable, "-m", "pdkv.cli", "proxy", "--port", str(port)]
    return [*command, "--prefill", f"http://127.0.0.1:{prefill_port}", "--decode", f"http://127.0.0.1:{decode_port}"]


@contextmanager
def running(command, log):
    """Runs a command until the end of the block, in a session of its own, so that all that it starts ends with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_well(port, process, log):
    """Waits until `/health` says so, for as long as the process lives."""
    while True:
        if process.poll() is not None:
            sys.exit(f"a server ended with {process.returncode}; its log ends:\n" + log.read_text()[-3000:])
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                return
        except OSError:
            time.sleep(0.5)


def complete(port, prompt, **fields):
    """Asks for a greedy completion: its text, tokens and log-probabilities."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 1}
    body |= {"return_token_ids": True, "ignore_eos": True} | fields
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        [choice] = json.load(answer)["choices"]
    return choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"]


def bytes_fetched(port):
    """What the connector of an instance has fetched, as its metrics say."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        found = re.findall(r"^vllm:pdkv_bytes_transferred_sum\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return int(sum(map(float, found)))


def free_ports(count):
    """Ports that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def smollm2():
    """The model of pdkv's own tests, which is made of what `make vllm` has installed."""
    if find_spec("vllm") is None:
        sys.exit("this example needs vLLM: `make vllm`, then .venv-vllm/bin/python examples/vllm_pd/run.py")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from with_vllm import models

    return str(models.smollm2())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder with a model, or a name that vLLM knows")
    parser.add_argument("--prompt", default=PROMPT)
    arguments = parser.parse_args()
    model = arguments.model or smollm2()
    prefill_port, decode_port, proxy_port = free_ports(3)
    commands = {
        prefill_port: vllm(model, prefill_port, "kv_producer"),
        decode_port: vllm(model, decode_port, "kv_consumer"),
        proxy_port: proxy(proxy_port, prefill_port, decode_port),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(f"starting two instances of {Path(model).name}, which takes a minute or two")
        started = {
            port: stack.enter_context(running(command, folder / f"{port}.log")) for port, command in commands.items()
        }
        for port, process in started.items():
            wait_until_well(port, process, folder / f"{port}.log")
        print(f"prefill at port {prefill_port}, decode at {decode_port}, pdkv proxy at {proxy_port}")

        text, tokens, logprobs = complete(proxy_port, arguments.prompt)
        fetched = bytes_fetched(decode_port)
        # The salt keeps this prompt from finding in the instance's own cache what was fetched for the same one before.
        _, alone, alone_logprobs = complete(decode_port, arguments.prompt, cache_salt="alone")
        print(f"{arguments.prompt}\n--{text}")
        if tokens != alone or not all(map(lambda a, b: math.isclose(a, b, abs_tol=0.01), logprobs, alone_logprobs)):
            sys.exit(f"not the answer of one instance alone: {alone}, {alone_logprobs}")
        print(f"{len(tokens)} tokens and their log-probabilities equal to those of one instance alone")
        print(f"{fetched} bytes of KV cache were handed over")
        if not fetched:
            sys.exit("nothing was handed over")


if __name__ == "__main__":
    main()
