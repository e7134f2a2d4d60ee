"""`pdkv proxy`: a small router that gives the prompt to a prefill instance and the rest to a decode instance.

The modules are a straight line: `settings`, `answers`, `bodies` and `sse` decide and open no socket; `metrics` counts;
`instances` knows who is there and how busy, `probes` asks them; `legs` sends one request to one instance; `exchange`
takes a client's request through its legs, `returns` gives back what a prefill instance keeps for a leg that will not
come; `app` is the HTTP face, `serve` runs it until a signal, `cli` parses. Nothing else here knows what is in
`kv_transfer_params`: they pass from one instance to the other as they are. Importing this package imports none of them.
"""
