//! Raw one-sided transfers: no claim, no fence, only spans of registered regions and, if wanted, a
//! notification after the last byte. The protocol's node knows nothing of them; their deadlines and
//! ends are kept here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use pdkv_core::id::{PeerKey, TransferId};
use pdkv_core::node::{Destination, Outcome};
use pdkv_core::wire::{Message, Notify};
use pdkv_core::{Error, ErrorKind, Result};

use crate::completion::Watchers;
use crate::shared::{Shared, State};
use crate::transfer::TransferCore;

/// Ids of raw transfers have this bit, so that they never meet the node's.
const RAW_BIT: u64 = 1 << 63;

#[derive(Default)]
pub(crate) struct Raw {
    running: BTreeMap<TransferId, Running>,
    /// Questions about leases that wait for the peer's answer.
    renewals: BTreeMap<u64, Sender<Result<Duration>>>,
}

struct Running {
    core: Arc<TransferCore>,
    peer: PeerKey,
    deadline: Duration,
    notify: Option<Vec<u8>>,
}

impl Raw {
    pub(crate) fn owns(id: TransferId) -> bool {
        id.0 & RAW_BIT != 0
    }

    /// Ids come from one counter for all engines of the process: operations that are done inside
    /// the call take one without any lock.
    pub(crate) fn new_id() -> TransferId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        TransferId(NEXT.fetch_add(1, Ordering::Relaxed) | RAW_BIT)
    }

    pub(crate) fn begin(
        &mut self,
        core: &Arc<TransferCore>,
        peer: PeerKey,
        deadline: Duration,
        notify: Option<Vec<u8>>,
    ) {
        let id = Self::new_id();
        core.set_id(id);
        self.running.insert(
            id,
            Running {
                core: Arc::clone(core),
                peer,
                deadline,
                notify,
            },
        );
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.running
            .values()
            .filter(|running| !running.core.stop.load(Ordering::Relaxed))
            .map(|r| r.deadline)
            .min()
    }

    /// Ends what is past its deadline. Its memory is quiesced when the movers say so.
    pub(crate) fn tick(&self, now: Duration, completions: &Watchers) {
        let over = |running: &Running| running.deadline <= now && !running.core.stop.load(Ordering::Relaxed);
        for (id, running) in self.running.iter().filter(|(_, running)| over(running)) {
            let error = Error::new(
                ErrorKind::TransferTimeout,
                "raw transfer",
                format!("transfer `{id}` passed its deadline"),
            );
            running.stop(failed(error), completions);
        }
    }

    pub(crate) fn cancel(&self, id: TransferId, completions: &Watchers) {
        if let Some(running) = self.running.get(&id) {
            let destination = Destination::Invalid;
            running.stop(Outcome::Cancelled { destination }, completions);
        }
    }

    /// Ends every transfer with a lost peer.
    pub(crate) fn peer_lost(&self, peer: PeerKey, error: &Error, completions: &Watchers) {
        for running in self.running.values().filter(|running| running.peer == peer) {
            running.stop(failed(error.clone()), completions);
        }
    }

    pub(crate) fn expect_renewal(&mut self, request: u64, answer: Sender<Result<Duration>>) {
        self.renewals.insert(request, answer);
    }

    pub(crate) fn renewed(&mut self, request: u64, result: Result<Duration>) {
        if let Some(answer) = self.renewals.remove(&request) {
            // The asker may have given up waiting; then the answer is of no use to anybody.
            let _ = answer.send(result);
        }
    }
}

impl Running {
    /// Ends it now, and its movers as soon as they look.
    fn stop(&self, outcome: Outcome, completions: &Watchers) {
        self.core.stop.store(true, Ordering::Release);
        if self.core.finish(outcome) {
            completions.push(self.core.id());
        }
    }
}

fn failed(error: Error) -> Outcome {
    Outcome::Failed {
        error,
        destination: Destination::Invalid,
    }
}

/// The movers let go: the notification goes out after the data, then the owner is told. What was ended
/// before by its deadline or its owner sends none: both ends know the same.
pub(crate) fn finish(
    shared: &Shared,
    state: &mut State,
    id: TransferId,
    core: &Arc<TransferCore>,
    result: Result<u64>,
) {
    let Some(running) = state.raw.running.remove(&id) else {
        return;
    };
    let ended = core.ended();
    let sent = result.and_then(|bytes| {
        let entry = state.peers.get_mut(&running.peer);
        match (running.notify, entry) {
            _ if ended => Ok(bytes),
            (None, _) => Ok(bytes),
            (Some(bytes_out), Some(entry)) => entry
                .send(&Message::Notify(Notify { bytes: bytes_out }))
                .map(|()| bytes),
            (Some(_), None) => Err(Error::new(
                ErrorKind::PeerLost,
                "notify",
                "the peer was lost before the notification",
            )),
        }
    });
    let outcome = match sent {
        Ok(bytes) => Outcome::Done { bytes },
        Err(error) => failed(error),
    };
    if core.finish(outcome) {
        shared.completions.push(id);
    }
    core.set_quiesced();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TransportKind;
    use crate::transfer::{Path, TransferState};
    use crate::{Engine, EngineConfig};

    #[test]
    fn a_transfer_that_was_cancelled_in_time_sends_no_notification() {
        let writer = Engine::new("writer", EngineConfig::default()).unwrap();
        let owner = Engine::new("owner", EngineConfig::default()).unwrap();
        let peer = writer
            .connect(owner.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        let path = Path {
            transport: TransportKind::Cma,
            rdma: false,
            detail: String::new(),
            reasons: Vec::new(),
        };
        let core = Arc::new(TransferCore::new(Arc::new(path)));
        let shared = writer.shared();
        let notice = Some(b"data".to_vec());
        shared.drive(|state, _| state.raw.begin(&core, peer.link.key, Duration::MAX, notice));
        shared.cancel(core.id());
        // The last byte was placed just before the movers looked at the flag.
        shared.moved_id(core.id(), &core, Ok(1));
        assert_eq!(core.state(), TransferState::Cancelled);
        peer.notify(b"later").unwrap();
        loop {
            let came = owner.notifications();
            if !came.is_empty() {
                assert_eq!(came, [("writer".to_owned(), b"later".to_vec())]);
                break;
            }
            std::thread::yield_now();
        }
    }
}
