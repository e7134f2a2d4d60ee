//! A safe face on UCX, which is found and loaded at run time: no headers and no UCX when this is built.
//!
//! One-sided copies between registered memory, active messages, and a worker whose end is a fence, over
//! whatever transports a copy of UCX from 1.13 on has. It knows no KV word: no block, no layer, no peer, no
//! transfer. Every call is bounds-checked, and memory stays alive for as long as UCX may touch it. Linux only.
//!
//! ```no_run
//! use pdkv_ucx::{Context, Features, Library, Origin, Settings, Worker};
//!
//! # fn main() -> pdkv_core::Result<()> {
//! let library = Library::open("libucp.so.0".as_ref(), Origin::System)?;
//! let context = Context::open(&library, &Settings::default(), Features::default())?;
//! let worker = Worker::create(&context)?;
//! println!("UCX {} over {:?}", library.version(), context.resources());
//! println!("an address of {} bytes", worker.address()?.len());
//! # Ok(())
//! # }
//! ```

#![allow(clippy::wildcard_imports, reason = "C names carry their own prefix")]

mod abi;
mod context;
mod endpoint;
mod exit;
mod file;
pub mod find;
mod fork;
mod globals;
mod guard;
mod inbox;
mod library;
pub mod limit;
mod list;
mod log;
mod memory;
mod message;
mod print;
mod probe;
mod remote;
mod resource;
mod room;
mod sealed;
mod settings;
mod signals;
mod status;
mod symbols;
mod tally;
mod worker;

pub use context::{Context, Features};
pub use endpoint::{Direction, Endpoint, ErrorMode, Span};
pub use exit::before_exit;
pub use guard::callback_panics;
pub use inbox::{Inbox, InboxLimits, Incoming};
pub use library::{Library, Origin, Version};
pub use memory::{MemoryHandle, Piece, PieceMemory};
pub use message::{Delivery, MESSAGE_MAX_PIECES};
pub use probe::Probe;
pub use remote::RemoteKey;
pub use resource::{Link, Resource};
pub use sealed::SEALED_MAX_BYTES;
pub use settings::{DEFAULTS, DefaultSetting, Hosts, Setting, Settings, Source};
pub use tally::Tally;
pub use worker::Worker;
