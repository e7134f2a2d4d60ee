//! `tcp`: streams between any two hosts, or Unix-domain streams on one host where neither memory
//! can be shared nor the kernel's cross-memory calls are allowed.
//!
//! The initiator asks for units of a granted claim; the owner gathers them from its pages by its
//! own tables and the initiator scatters them into its own. No address and no block id of the
//! other side is used, and no user-space byte is copied; but pages of a GPU go by way of pinned memory. A
//! stream carries one transfer at a time; one that ended in the middle of a frame is closed, so that a late
//! byte has nowhere to go.

mod client;
mod codec;
mod pages;
mod server;
mod socket;

pub(crate) use client::{Dial, TcpLink};
pub(crate) use pages::Stagings;
pub(crate) use server::serve_stream;
pub(crate) use socket::{Socket, Streams};
