"""`--mode pipe`: tensors through a `pdkv.Pipe` between two processes, beside what else could carry them.

`exchange` and `tensors` say what is sent and check it and know no pipe; `ends` are the two ends of pdkv's pipe;
`peers` drives other carriers in processes of their own (`peer_end`, `gloo_end`); `measure` measures,
`floors` judges.
"""
