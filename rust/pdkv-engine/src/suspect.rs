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

    /// Whether it is the process of this number.
    fn is_process(&self, pid: u32) -> bool {
        match self {
            Self::Process(process) => process.pid() == pid,
            Self::Neighbour(_) => pid == std::process::id(),
            Self::Lane(_) => false,
        }
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

/// Adds the process that the kernel numbers `pid` to those who may write, unless it is there; `false` when it can't be watched. Without a number it is in
/// another PID namespace, or an engine of this process.
pub(crate) fn watch(writers: &mut Vec<Writer>, pid: Option<u32>) -> bool {
    let Some(pid) = pid else {
        return writers.iter().any(|writer| matches!(writer, Writer::Neighbour(_)));
    };
    let known = writers.iter().any(|writer| writer.is_process(pid));
    known || Writer::process(pid).map(|writer| writers.push(writer)).is_some()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_number_is_watched_whatever_the_hello_said() {
        let (said, real) = (std::os::unix::process::parent_id(), std::process::id());
        let mut writers = vec![Writer::process(said).expect("our parent lives")];
        for _ in 0..2 {
            assert!(watch(&mut writers, Some(real)));
            assert_eq!(
                writers.len(),
                2,
                "both must be gone before blocks are reused, and each counts once"
            );
        }
        assert!(writers[1].is_process(real));
        assert!(!watch(&mut writers, None), "nobody knows which process that is");
        assert!(!watch(&mut Vec::new(), Some(u32::MAX)));
    }
}
