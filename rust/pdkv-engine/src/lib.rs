//! The transfer engine: registry, peers, transports and progress threads around `pdkv-core`.
#![forbid(unsafe_code)]
