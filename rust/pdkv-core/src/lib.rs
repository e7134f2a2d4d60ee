//! Decisions of KV-cache transfer, without I/O.
//!
//! What is here: ids, dtypes, layouts, block tables, the planner, the state machines of transfers,
//! sessions, exports and leases, the wire schema and the error type. What is deliberately absent:
//! sockets, threads, clocks, random numbers and `unsafe`. Time and randomness are arguments, so
//! everything in this crate runs under the simulator and under miri.
#![forbid(unsafe_code)]

pub mod block_table;
pub mod capability;
pub mod config;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod export;
pub mod gpu_memory;
pub mod hex;
pub mod id;
pub mod issuer;
pub mod lane;
pub mod layout;
pub mod lease;
pub mod lookup;
mod marks;
pub mod node;
pub mod pipe;
pub mod plan;
pub mod reference;
pub mod session;
pub mod shard;
pub mod span;
pub mod transfer;
pub mod wire;

pub use error::{Error, ErrorKind, Result, Retry, Scope};
