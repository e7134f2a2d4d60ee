//! The transfer engine: registry, peers, transports and progress threads around `pdkv-core`.
//!
//! All decisions are `pdkv-core`'s, all unsafe operations `pdkv-device`'s. Here they meet real
//! sockets, threads and time. Nothing in this crate knows Python.
#![forbid(unsafe_code)]

mod accept;
mod actions;
mod cache;
mod channel;
mod clock;
mod closing;
mod completion;
mod config;
mod connect;
mod dial;
mod door;
mod ended;
mod engine;
mod export;
mod far_look;
mod fence;
mod inbox;
mod issue;
mod lend;
mod link;
mod lists;
mod local;
mod look;
mod mapping;
mod mover;
mod peer;
mod pipe;
mod post;
mod pull;
mod raw;
mod raw_fence;
mod reactor;
mod reader;
mod registry;
mod remains;
mod remote;
mod reply;
mod seats;
mod shared;
pub mod sim;
mod stats;
mod suspect;
mod transfer;
mod transport;
mod view;

pub use cache::{KvCache, PullOptions};
pub use completion::Completions;
pub use config::{EngineConfig, OneSidedPolicy, TransportKind, UcxConfig, UcxOrigin};
pub use engine::{Engine, Region, RegionDescriptor};
pub use export::Export;
pub use issue::{Stated, issue};
pub use pdkv_core::capability::Require;
pub use pdkv_core::gpu_memory::GpuMemory;
pub use pdkv_core::issuer::Issuer;
pub use peer::{LinkInfo, LocalSpan, Peer, RawOptions, RemoteSpan};
pub use pipe::{PipeBuffer, PipeItem, PipeReceiver, PipeSender, PipeStats, PipeTensor};
pub use stats::EngineStats;
pub use transfer::{Path, Transfer, TransferState, TransferStats};
