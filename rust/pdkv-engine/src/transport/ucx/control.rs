//! What other threads may do with a lane: give it work, end it, and learn that it is over. The lane itself
//! belongs to its thread.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pdkv_core::id::PeerKey;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::EventFd;

use crate::transport::Work;

/// Lanes that one peer may have here: one, and those that are ending.
const MAX_LANES: usize = 4;

/// One lane, seen from outside its thread.
pub(crate) struct Control {
    wake: EventFd,
    ended: AtomicBool,
    gone: AtomicBool,
    queue: Mutex<Queue>,
    stream: Mutex<Option<Arc<TcpStream>>>,
}

#[derive(Default)]
struct Queue {
    works: VecDeque<Arc<Work>>,
    closed: bool,
}

impl Control {
    /// # Errors
    /// `Capacity` when the process has no descriptor left.
    pub(super) fn new() -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            wake: EventFd::new()?,
            ended: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            queue: Mutex::default(),
            stream: Mutex::default(),
        }))
    }

    /// The side channel, so that ending the lane tells the other end at once.
    pub(super) fn attach(&self, stream: &Arc<TcpStream>) {
        *self.stream.lock().expect("no holder panics") = Some(Arc::clone(stream));
        if self.ended() {
            self.end();
        }
    }

    /// Ends the lane. Its thread lets go of memory and then says so.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        if let Some(stream) = &*self.stream.lock().expect("no holder panics") {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.wake.notify();
    }

    pub(super) fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Gives the lane work, or gives it back when the lane is over.
    pub(super) fn push(&self, work: Arc<Work>) -> std::result::Result<(), Arc<Work>> {
        let mut queue = self.queue.lock().expect("no holder panics");
        if queue.closed {
            return Err(work);
        }
        queue.works.push_back(work);
        drop(queue);
        self.wake.notify();
        Ok(())
    }

    /// Whether [`push`](Self::push) would take work now.
    pub(super) fn takes_work(&self) -> bool {
        !self.ended() && !self.queue.lock().expect("no holder panics").closed
    }

    pub(super) fn pop(&self) -> Option<Arc<Work>> {
        self.queue.lock().expect("no holder panics").works.pop_front()
    }

    /// Takes no more work; returns what nobody has begun.
    pub(super) fn close(&self) -> VecDeque<Arc<Work>> {
        let mut queue = self.queue.lock().expect("no holder panics");
        queue.closed = true;
        std::mem::take(&mut queue.works)
    }

    pub(super) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Nothing of this lane touches memory any more.
    pub(super) fn set_gone(&self) {
        *self.stream.lock().expect("no holder panics") = None;
        self.gone.store(true, Ordering::Release);
    }

    /// Whether UCX is out of all memory on this lane's behalf.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

/// No more lanes in this process.
static EXITING: AtomicBool = AtomicBool::new(false);

/// Lets no lane come up any more, in any engine of this process.
pub(crate) fn refuse_lanes() {
    EXITING.store(true, Ordering::Release);
}

/// The lanes of an engine, by peer.
#[derive(Default)]
pub(crate) struct Lanes {
    list: Mutex<Vec<(PeerKey, Arc<Control>)>>,
}

impl Lanes {
    /// # Errors
    /// `Capacity` when the peer has as many lanes as any may have: each costs a thread here.
    pub(super) fn enter(&self, peer: PeerKey, control: &Arc<Control>) -> Result<()> {
        let mut list = self.list.lock().expect("no holder panics");
        if EXITING.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "lane", "the process exits"));
        }
        list.retain(|(_, control)| !control.is_gone());
        if list.iter().filter(|(key, _)| *key == peer).count() >= MAX_LANES {
            return Err(Error::new(
                ErrorKind::Capacity,
                "lane",
                format!("the peer has `{MAX_LANES}` lanes already"),
            ));
        }
        list.push((peer, Arc::clone(control)));
        Ok(())
    }

    /// Ends the lanes of a peer that is lost.
    pub(crate) fn end(&self, peer: PeerKey) {
        let list = self.list.lock().expect("no holder panics");
        for (_, control) in list.iter().filter(|(key, _)| *key == peer) {
            control.end();
        }
    }

    /// Memory was deregistered: owners look whether it was theirs to lend.
    pub(crate) fn wake_all(&self) {
        for (_, control) in self.list.lock().expect("no holder panics").iter() {
            control.wake.notify();
        }
    }

    /// Ends every lane, the peers' connections untouched.
    pub(crate) fn end_all(&self) {
        for (_, control) in self.list.lock().expect("no holder panics").iter() {
            control.end();
        }
    }

    /// Whether every lane is gone.
    pub(crate) fn none(&self) -> bool {
        let mut list = self.list.lock().expect("no holder panics");
        list.retain(|(_, control)| !control.is_gone());
        list.is_empty()
    }
}
