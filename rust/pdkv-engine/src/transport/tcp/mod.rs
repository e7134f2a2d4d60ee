//! `tcp`: streams between any two hosts, or Unix-domain streams on one host where neither memory
//! can be shared nor the kernel's cross-memory calls are allowed.
//!
//! The initiator asks for units of a granted claim; the owner gathers them from its pages by its
//! own tables and the initiator scatters them into its own. No address and no block id of the
//! other side is used, and no user-space byte is copied; but pages of a GPU go by way of pinned memory. The
//! transfers from a peer share the streams to it, of which there are no more than an owner takes; those that find
//! none idle wait, without a thread. A stream carries one transfer at a time; one that ended in the middle of a
//! frame is closed, so that a late byte has nowhere to go.

mod client;
mod codec;
mod pages;
mod pool;
mod server;
mod socket;
mod stream;

pub(crate) use client::{Dial, TcpLink};
pub(crate) use codec::Response;
pub(crate) use pages::Stagings;
pub(crate) use server::{Greeting, serve_stream};
pub(crate) use socket::{Socket, Streams};
