//! Decisions of KV-cache transfer, without I/O.
//!
//! What is here: ids, dtypes, layouts, block tables, the planner, the state machines of transfers,
//! sessions, exports and leases, the wire schema and the error type. What is deliberately absent:
//! sockets, threads, clocks, random numbers and `unsafe`. Time and randomness are arguments, so
//! everything in this crate runs under the simulator and under miri.
#![forbid(unsafe_code)]

pub mod error;
pub mod hex;
pub mod id;

pub use error::{Error, ErrorKind, Result, Retry, Scope};
