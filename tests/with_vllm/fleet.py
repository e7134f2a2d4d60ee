"""Two servers that prefill and two that decode, with trained weights, and the proxy in front.

Started once for all tests. Beside them an engine without a connector, which has the reference answers. Of the decoding
servers the first fails a request whose KV it can't get and the second computes it itself.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from with_vllm import models, settings
from with_vllm.client import post
from with_vllm.engines import Engine
from with_vllm.ports import free_port
from with_vllm.servers import ForkedServer, Program

MAX_TOKENS = 512
# 120 blocks of this model.
KV_BYTES = 180 << 20
LEASE_S = 20


class Fleet:
    """The programs, and what each answer should be."""

    def __init__(self, folder, connector):
        model = models.smollm2()
        arguments = ("--max-model-len", str(MAX_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES))

        def server(name, role, policy):
            transfer = settings.transfer(connector, role, policy=policy, kv_lease_duration=LEASE_S)
            return ForkedServer(name, folder, model, transfer=transfer, arguments=arguments)

        self.reference = Engine("reference", folder, model, max_model_len=MAX_TOKENS, kv_cache_memory_bytes=KV_BYTES)
        self.prefills = [server(f"prefill-{at}", "kv_producer", "fail") for at in range(2)]
        self.decodes = [server(f"decode-{policy}", "kv_consumer", policy) for policy in ("fail", "recompute")]
        self.proxy = proxy(folder, self.prefills, self.decodes)

    @property
    def servers(self):
        return [*self.prefills, *self.decodes]

    def wait(self):
        for program in (*self.servers, self.proxy):
            program.wait()
        self.reference.wait_until_started()
        return self

    def tokens(self, text):
        """The token ids of a text, or of a chat of one message."""
        body = {"model": "model", "prompt": text}
        return post(f"{self.decodes[0].url}/tokenize", body)["tokens"]

    def chat_tokens(self, text):
        body = {"model": "model", "messages": [{"role": "user", "content": text}]}
        return post(f"{self.decodes[0].url}/tokenize", body)["tokens"]

    def close(self):
        """Ends everything, and says whether everything ended by itself."""
        programs = [self.proxy, *self.servers]
        with ThreadPoolExecutor(len(programs)) as pool:
            return all(list(pool.map(Program.stop, programs))) & self.reference.close()


def proxy(folder, prefills, decodes):
    """`pdkv proxy` in front of the servers."""
    port = free_port()
    command = [sys.executable, "-m", "pdkv.cli", "proxy", "--port", str(port)]
    command += [word for server in prefills for word in ("--prefill", server.url)]
    command += [word for server in decodes for word in ("--decode", server.url)]
    return Program("proxy", folder, command, port)


def router(folder, prefill, decode):
    """The vLLM project's own router, which knows vLLM's NIXL connector and not pdkv."""
    port = free_port()
    command = [settings.script("vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", prefill.url, "--decode", decode.url, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    return Program("router", folder, command, port)
