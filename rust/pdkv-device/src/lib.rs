//! Memory and copies on one host: regions, shared pools, adoption, vectored kernel copies, and
//! gather/scatter between sockets and pages.
//!
//! This is the crate where `unsafe` lives; every raw operation has a safe, bounds-checked face here,
//! so that the engine above can forbid it. It knows no KV word: no block, no layer, no transfer, and
//! it never takes one of *our* addresses from outside: local bytes are always a [`HostRegion`] and an
//! offset. Linux only.

mod adopt;
mod cma;
mod copy;
mod credentials;
pub mod cuda;
mod event;
mod fds;
mod host;
mod io;
mod iov;
pub mod kernels;
pub mod limits;
mod mapping;
mod memory;
pub mod nvrtc;
mod object;
mod os;
pub mod pattern;
mod pool;
mod process;
mod range;
mod region;
mod registry;
mod stream;

pub use cma::{CMA_MAX_SPANS, CmaBatch};
pub use copy::{CopyPath, CopyPipe, copy, copy_fence, copy_path, copy_with, gather, gather_into};
pub use credentials::PeerCredentials;
pub use event::EventFd;
pub use fds::{recv_fds, send_fds};
pub use host::{HostFacts, host_facts};
pub use io::{IO_MAX_PIECES, IoBatch};
pub use memory::Memory;
pub use pool::HugePages;
pub use process::Process;
pub use region::{HostRegion, SharedPart};
pub use stream::{Stop, configure_stream, recv_exact, send_exact};
