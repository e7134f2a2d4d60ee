//! Lost peers that may still be writing into our memory. A one-sided writer doesn't need its channel, so
//! blocks it was granted are reusable only once it is known to be out of them.

use std::sync::{Arc, Weak};
use std::time::Duration;

use pdkv_core::id::{PeerKey, TransferId};
use pdkv_core::wire::Hello;
use pdkv_device::Process;

use crate::engine::inproc_engine;
use crate::shared::Shared;
use crate::transport::ucx::Control;

/// How often a suspect is looked at.
const WATCH: Duration = Duration::from_millis(100);

/// Who moves the bytes when a peer writes by one-sided means.
pub(crate) enum Writer {
    /// Another process of this host: out of our memory at the latest when it is gone.
    Process(Arc<Process>),
    /// An engine of this very process: out when its movers say so.
    Neighbour(Weak<Shared>),
    /// A one-sided lane of `ucx`: out when our worker on it is destroyed.
    Lane(Arc<Control>),
}

impl Writer {
    /// The writer behind a hello; `None` when the peer can only write through our data streams, or is
    /// in another PID namespace, where the number it gives means another process.
    pub(crate) fn behind(hello: &Hello) -> Option<Self> {
        if !same_host(hello) || pdkv_device::host_facts().pid_namespace != hello.host.pid_namespace {
            return None;
        }
        if hello.host.pid == std::process::id() {
            return inproc_engine(hello.incarnation).map(Self::Neighbour);
        }
        Self::process(hello.host.pid)
    }

    /// The process that the kernel numbers `pid` here.
    pub(crate) fn process(pid: u32) -> Option<Self> {
        Process::open(pid).ok().map(|process| Self::Process(Arc::new(process)))
    }

    /// Whether it can't write for any of its `transfers` any more.
    fn is_out(&self, transfers: &[TransferId]) -> bool {
        match self {
            Self::Process(process) => !process.alive(),
            Self::Neighbour(engine) => engine.upgrade().is_none_or(|engine| !engine.runs_any(transfers)),
            Self::Lane(lane) => lane.is_gone(),
        }
    }

    /// Whether it will never write again, whatever is granted.
    pub(crate) fn is_spent(&self) -> bool {
        matches!(self, Self::Lane(lane) if lane.is_gone())
    }
}

/// Whether the peer says that it runs on this host, in whatever namespace.
pub(crate) fn same_host(hello: &Hello) -> bool {
    let here = pdkv_device::host_facts().boot_id;
    !here.is_empty() && here == hello.host.boot_id
}

/// The lost peers whose writers are waited for.
#[derive(Default)]
pub(crate) struct Suspects {
    list: Vec<(PeerKey, Vec<Writer>)>,
}

impl Suspects {
    pub(crate) fn add(&mut self, peer: PeerKey, writers: Vec<Writer>) {
        self.list.push((peer, writers));
    }

    /// When they are to be looked at.
    pub(crate) fn next_look(&self, now: Duration) -> Option<Duration> {
        (!self.list.is_empty()).then(|| now + WATCH)
    }
}

/// Looks at every suspect; the progress thread does it.
pub(crate) fn look(shared: &Arc<Shared>) {
    // Taken out, because a neighbour has a lock of its own and must not be asked under ours.
    let mut suspects = std::mem::take(&mut shared.lock().suspects.list);
    suspects.retain(|(peer, writers)| {
        let transfers = shared.lock().node.writers_of(*peer);
        let out = writers.iter().all(|writer| writer.is_out(&transfers));
        if out {
            shared.drive(|state, now| state.node.writer_dead(now, *peer));
        }
        // A writer that has reported over another channel is on no record any more.
        !out && !transfers.is_empty()
    });
    shared.lock().suspects.list.append(&mut suspects);
}
