"""A carrier for tests: arrays over one plain socket. Run as a program, with what goes wrong as an argument."""

import socket
import sys

import numpy as np

from pdkv.bench import control
from pdkv.bench.pipe import peer_end

WRONG = sys.argv[1] if len(sys.argv) > 1 else ""


class Plain(peer_end.Carrier):
    name = "plain"
    note = "made of one socket"
    in_two_steps = True

    def __init__(self, exchange, role, address):
        if WRONG == "open":
            raise OSError("no such device")
        if role == "src":
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.address = control.join_address(*self.listener.getsockname())
        else:
            self.address, self.listener = address, None

    def connect(self):
        if self.listener:
            self.sock, _ = self.listener.accept()
        else:
            self.sock = socket.create_connection(control.split_address(self.address))

    def send(self, sent):
        if WRONG == "send":
            raise OSError("the wire is cut")
        for array in sent:
            raw = array.tobytes()
            self.sock.sendall(raw[:-1] + b"\0" if WRONG == "flip" else raw)

    def receive(self, landing):
        for array in landing:
            view = memoryview(array.reshape(-1).view(np.uint8))
            while view:
                view = view[self.sock.recv_into(view) :]
        return [array.tobytes() for array in landing]

    def prove(self):
        return "well done"

    def check(self, received, proof):
        assert proof == "well done"

    def finish(self, received):
        return [np.frombuffer(raw, np.uint16).reshape(3, 5) for raw in received]


if __name__ == "__main__":
    peer_end.main(Plain)
