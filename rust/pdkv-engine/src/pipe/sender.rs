//! The sending end as its owner sees it. Sending queues; a thread of the pipe's own does the rest.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pdkv_core::pipe::{INLINE_MAX, ItemHead, Strided, TensorHead, ToReceiver};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;

use super::lobby::End;
use super::queue::Queue;
use super::{PipeStats, broken, pump};
use crate::link::PeerLink;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::transfer::Path;

/// What both the owner and the thread of a sending end hold.
pub(super) struct Outgoing {
    pub(super) shared: Arc<Shared>,
    pub(super) link: Arc<PeerLink>,
    pub(super) channel: Vec<u8>,
    pub(super) queue: Queue,
    /// The way that the last large item took.
    pub(super) path: Mutex<Option<Path>>,
}

impl Outgoing {
    fn path(&self) -> Option<Path> {
        self.path.lock().expect("no holder panics").clone()
    }
}

impl End for Outgoing {
    fn cut(&self, error: &Error) {
        self.queue.cut(error);
    }

    fn part(&self, _error: &Error) {
        // The session's end tells the receiver.
    }

    fn tick(&self, _now: Duration) -> Option<Duration> {
        None
    }
}

/// A tensor that is to be sent.
#[derive(Clone, Copy, Debug)]
pub struct PipeTensor<'a> {
    /// The name of its dtype, which the receiver is told.
    pub dtype: &'a str,
    /// Its extents, outermost first.
    pub shape: &'a [u64],
    /// Bytes of an element.
    pub itemsize: u64,
}

impl PipeTensor<'_> {
    fn head(&self) -> Result<TensorHead<'_>> {
        TensorHead::new(self.dtype, self.shape, self.itemsize)
    }
}

/// The sending end of a pipe. Dropping it gives up what is queued, as [`abort`](Self::abort) does.
pub struct PipeSender {
    core: Arc<Outgoing>,
}

impl Peer {
    /// Opens a pipe to the peer, whose engine accepts it under the same name. Returns before it has: what is sent
    /// meanwhile waits. Once more than `limit_bytes` of tensors are queued, sending waits.
    ///
    /// # Errors
    /// `Unsupported` when the peer's release has no pipes, `PeerUnreachable` when it takes no more streams,
    /// `Capacity`, `PeerLost`, `Closed`.
    pub fn open_pipe(&self, channel: &[u8], limit_bytes: u64) -> Result<PipeSender> {
        self.shared.check_open("open_pipe")?;
        self.link.check_alive()?;
        let mut hello = Vec::new();
        ToReceiver::Open { channel }.encode(&mut hello)?;
        let dial = self.link.pipes.as_ref().ok_or_else(|| {
            let text = format!("the release of `{}` has no pipes", self.name());
            Error::new(ErrorKind::Unsupported, "open_pipe", text).with_hint("both ends need a release with pipes")
        })?;
        let stream = dial()?;
        stream.set_nonblocking(true).map_err(broken)?;
        let core = Arc::new(Outgoing {
            shared: Arc::clone(&self.shared),
            link: Arc::clone(&self.link),
            channel: channel.to_vec(),
            queue: Queue::new(limit_bytes)?,
            path: Mutex::new(None),
        });
        pump::start(&core, stream, hello)?;
        self.shared.pipes.enter(self.link.key, &core);
        // Whoever was lost or closed meanwhile has not heard of this pipe.
        let alive = self
            .shared
            .check_open("open_pipe")
            .and_then(|()| self.link.check_alive());
        if let Err(error) = alive {
            core.queue.fail(error.clone());
            return Err(error);
        }
        Ok(PipeSender { core })
    }
}

impl PipeSender {
    /// The pipe's name.
    pub fn channel(&self) -> &[u8] {
        &self.core.channel
    }

    /// Queues an item without memory to be kept: one that has no tensor, or at most 64 KiB of it, which `fill` writes
    /// to where it is told, before this returns. `false` when there was no room within `wait`; then nothing happened.
    ///
    /// # Errors
    /// What ended the pipe; `Layout`, `Capacity` for items that can't be sent; what `fill` says.
    pub fn send_small(
        &self,
        tag: &[u8],
        tensor: Option<PipeTensor<'_>>,
        wait: Duration,
        fill: &dyn Fn(&mut [u8]) -> Result<()>,
    ) -> Result<bool> {
        self.check("send")?;
        let tensor = tensor.as_ref().map(PipeTensor::head).transpose()?;
        if tensor.is_some_and(|tensor| tensor.nbytes > INLINE_MAX as u64) {
            return Err(Error::new(
                ErrorKind::Internal,
                "send",
                "a large item was sent as a small one",
            ));
        }
        let head = ItemHead { seq: 0, tag, tensor };
        self.core.queue.push_small(head, wait, fill)
    }

    /// Queues an item whose tensor stays in `memory` until it has been written into the receiver's: `at` says where
    /// its bytes lie, counted from the first byte of `memory`. `false` when there was no room within `wait`.
    ///
    /// # Errors
    /// What ended the pipe; `Layout`, `Capacity`, `Region` for items that can't be sent.
    pub fn send_large(
        &self,
        tag: &[u8],
        tensor: PipeTensor<'_>,
        memory: &Arc<HostRegion>,
        at: &Strided,
        wait: Duration,
    ) -> Result<bool> {
        self.check("send")?;
        let head = tensor.head()?;
        if head.nbytes != at.nbytes() || head.nbytes <= INLINE_MAX as u64 || at.reach() > memory.len() {
            let text = "the memory of a large item is not its tensor's";
            return Err(Error::new(ErrorKind::Internal, "send", text));
        }
        let head = ItemHead {
            seq: 0,
            tag,
            tensor: Some(head),
        };
        self.core.queue.push_large(head, memory, at, wait)
    }

    fn check(&self, operation: &'static str) -> Result<()> {
        self.core.shared.check_process(operation)
    }

    /// How many items were sent, as [`flushed`](Self::flushed) counts them.
    pub fn accepted(&self) -> u64 {
        self.core.queue.accepted()
    }

    /// Waits until the receiver's application has taken the first `items`; `false` when it hadn't within `wait`.
    ///
    /// # Errors
    /// What ended the pipe before.
    pub fn flushed(&self, items: u64, wait: Duration) -> Result<bool> {
        self.check("flush")?;
        self.core.queue.flushed(items, wait)
    }

    /// Takes no more items and says goodbye once the receiver has them all. Doing it twice is no error.
    ///
    /// # Errors
    /// `Unsupported` in a forked child.
    pub fn close(&self) -> Result<()> {
        self.check("close")?;
        self.core.queue.close();
        Ok(())
    }

    /// Waits until a [`close`](Self::close) is through; `false` when it wasn't within `wait`.
    ///
    /// # Errors
    /// What kept items from the receiver, unless that was told before.
    pub fn closed(&self, wait: Duration) -> Result<bool> {
        self.check("close")?;
        self.core.queue.closed(wait)
    }

    /// Gives up: what is queued is dropped, and the receiver is told.
    pub fn abort(&self) {
        if self.core.shared.at_home() {
            let text = "the sender gave up; what it had queued is dropped";
            self.core
                .queue
                .fail(Error::new(ErrorKind::TransferCancelled, "pipe", text));
        }
    }

    /// Bytes of tensors that wait to be sent.
    pub fn queued_bytes(&self) -> u64 {
        if self.core.shared.at_home() {
            self.core.queue.queued()
        } else {
            0
        }
    }

    /// Whether it takes items.
    pub fn alive(&self) -> bool {
        self.core.shared.at_home() && self.core.queue.is_open()
    }

    /// The way that the last large item took.
    pub fn path(&self) -> Option<Path> {
        self.core.shared.at_home().then(|| self.core.path())?
    }

    /// What it has sent, or is about to.
    pub fn stats(&self) -> PipeStats {
        if self.core.shared.at_home() {
            self.core.queue.stats()
        } else {
            PipeStats::default()
        }
    }
}

impl Drop for PipeSender {
    fn drop(&mut self) {
        self.abort();
    }
}

impl fmt::Debug for PipeSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let channel = String::from_utf8_lossy(&self.core.channel);
        write!(f, "PipeSender({channel} to {})", self.core.link.remote.name)
    }
}
