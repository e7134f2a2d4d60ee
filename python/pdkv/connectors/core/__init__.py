"""Disaggregated prefill without a framework: what a connector decides, and what it carries out.

Two sides, in two processes of one LLM engine. The scheduler side (`scheduler`) decides: what is exported, what is
pulled, what is refused. The worker side (`worker`), one a rank, does it with a `pdkv.Engine` and tells what has ended.
What goes from one to the other is in `work`. Imports neither torch nor any LLM engine: a connector translates.
"""
