//! The receiving end as its owner sees it. It has no thread: whoever calls [`PipeReceiver::recv`] reads the stream, one at
//! a time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pdkv_core::id::Incarnation;
use pdkv_core::{Error, ErrorKind, Result};

use super::buffer::PipeBuffer;
use super::guest::Guest;
use super::incoming::Incoming;
use super::lobby::End;
use super::{PipeStats, closed_here};
use crate::shared::Shared;

/// One received item.
#[derive(Debug)]
pub struct PipeItem {
    /// The application's bytes.
    pub tag: Vec<u8>,
    /// The name of the tensor's dtype; `None` when there is no tensor.
    pub dtype: Option<String>,
    /// The tensor's extents, outermost first.
    pub shape: Vec<u64>,
    /// The tensor's bytes, dense and row-major; `None` when there is no tensor.
    pub bytes: Option<PipeBuffer>,
}

/// The receiving end of a pipe. Dropping it closes it.
pub struct PipeReceiver {
    core: Arc<Incoming>,
}

impl PipeReceiver {
    pub(crate) fn new(shared: &Arc<Shared>, guest: Guest, max_item_bytes: u64) -> Result<Self> {
        let core = Arc::new(Incoming::new(shared, guest, max_item_bytes)?);
        shared.pipes.enter(core.peer, &core);
        // A peer that was lost meanwhile has not heard of this pipe.
        if !shared.lock().peers.contains_key(&core.peer) {
            let text = format!("the peer `{}` was lost meanwhile", core.name);
            core.cut(&Error::new(ErrorKind::PeerLost, "accept_pipe", text));
        }
        Ok(Self { core })
    }

    /// The pipe's name.
    pub fn channel(&self) -> &[u8] {
        &self.core.channel
    }

    /// The name of the engine that sends.
    pub fn peer(&self) -> &str {
        &self.core.name
    }

    /// That engine's life.
    pub fn incarnation(&self) -> Incarnation {
        self.core.incarnation
    }

    /// The next item, if it was read ahead and is small: never waits, asks the system nothing.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn ready(&self) -> Result<Option<PipeItem>> {
        self.core.receive(None)
    }

    /// The next item; `None` when it hadn't come within `wait`: then the next call goes on with it.
    ///
    /// # Errors
    /// `Closed` once the sender has closed the pipe and everything was received, or this end is closed (the context
    /// `closed_by` tells `peer` or `here`). `PeerLost`. `TransferCancelled` when the sender gave up, and whatever else
    /// it failed of. `Integrity` for garbage. `Capacity` when there is no memory for the item: it is not lost.
    /// `Unsupported` in a forked child.
    pub fn recv(&self, wait: Duration) -> Result<Option<PipeItem>> {
        self.core.receive(Some(wait))
    }

    /// Ends it: whoever receives is woken, the sender is told. Doing it twice is no error, and in a forked child it
    /// does nothing.
    pub fn close(&self) {
        if self.core.shared.at_home() {
            self.core.close(&closed_here("recv"));
        }
    }

    /// Whether something may still come.
    pub fn alive(&self) -> bool {
        if !self.core.shared.at_home() || self.core.cut_error().is_some() {
            return false;
        }
        // Somebody reads: then it is.
        self.core.lock_desk().as_ref().is_none_or(|input| input.done.is_none())
    }

    /// What was received.
    pub fn stats(&self) -> PipeStats {
        if self.core.shared.at_home() {
            self.core.stats()
        } else {
            PipeStats::default()
        }
    }
}

impl Drop for PipeReceiver {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for PipeReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let channel = String::from_utf8_lossy(&self.core.channel);
        write!(f, "PipeReceiver({channel} from {})", self.core.name)
    }
}
