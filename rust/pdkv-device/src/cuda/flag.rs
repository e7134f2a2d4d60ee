//! The word by which the posts of a queue say that they are over, so that nobody has to ask the driver.
//!
//! It is pinned memory of the host's. A post raises it to its own number plus one: the last block of its launch does, with a release at the scope of
//! the system, once every block has made its writes visible; or the stream, where something comes after the launch or there is none. Posts of
//! a stream are over in their order, so the word only grows, and says of all posts below it that they are over.

use std::sync::atomic::{AtomicU64, Ordering};

use pdkv_core::Result;

use super::context::Context;
use super::memory::PinnedBuffer;

/// A word that a device writes and the host reads.
#[derive(Debug)]
pub(super) struct Flag(PinnedBuffer);

impl Flag {
    /// One that is 0.
    ///
    /// # Errors
    /// `Device` when there is no pinned memory.
    pub(super) fn new(context: &Context) -> Result<Self> {
        PinnedBuffer::new(context, size_of::<u64>()).map(Self)
    }

    /// Where the device finds it.
    pub(super) fn address(&self) -> u64 {
        self.0.address()
    }

    /// What it was raised to. Whatever was written before that can be seen by whoever has seen this.
    pub(super) fn value(&self) -> u64 {
        let word = std::ptr::with_exposed_provenance_mut(self.0.address() as usize);
        // SAFETY: eight bytes of the driver's page-locked memory, aligned to a page and there as long as `self`; all that is ever done to them is that
        // the device stores whole words and the host loads them here.
        let word = unsafe { AtomicU64::from_ptr(word) };
        word.load(Ordering::Acquire)
    }
}
