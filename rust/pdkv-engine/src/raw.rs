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
use pdkv_device::Process;

use crate::shared::{Shared, State};
use crate::transfer::TransferCore;

/// Ids of raw transfers have this bit, so that they never meet the node's.
const RAW_BIT: u64 = 1 << 63;

#[derive(Default)]
pub(crate) struct Raw {
    running: BTreeMap<TransferId, Running>,
    /// Questions about leases that wait for the peer's answer.
    renewals: BTreeMap<u64, Sender<Result<Duration>>>,
    /// Lost peers of this host whose process may still be writing into our memory.
    pub(crate) suspects: Vec<(PeerKey, Arc<Process>)>,
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

    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.running
            .values()
            .filter(|running| !running.core.stop.load(Ordering::Relaxed))
            .map(|r| r.deadline)
            .min()
    }

    /// Ends what is past its deadline. Its memory is quiesced when the movers say so.
    pub(crate) fn tick(&mut self, now: Duration) {
        for (id, running) in &self.running {
            if running.deadline <= now && !running.core.stop.swap(true, Ordering::AcqRel) {
                running.core.finish(failed(Error::new(
                    ErrorKind::TransferTimeout,
                    "raw transfer",
                    format!("transfer `{id}` passed its deadline"),
                )));
            }
        }
    }

    pub(crate) fn cancel(&mut self, id: TransferId) {
        if let Some(running) = self.running.get(&id) {
            running.core.stop.store(true, Ordering::Release);
            running.core.finish(Outcome::Cancelled {
                destination: Destination::Invalid,
            });
        }
    }

    /// Ends every transfer with a lost peer.
    pub(crate) fn peer_lost(&mut self, peer: PeerKey, error: &Error) {
        for running in self.running.values().filter(|running| running.peer == peer) {
            running.core.stop.store(true, Ordering::Release);
            running.core.finish(failed(error.clone()));
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

fn failed(error: Error) -> Outcome {
    Outcome::Failed {
        error,
        destination: Destination::Invalid,
    }
}

/// The movers let go: the notification goes out after the data, then the owner is told.
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
    let sent = result.and_then(|bytes| {
        let entry = state.peers.get_mut(&running.peer);
        match (running.notify, entry) {
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
    core.finish(match sent {
        Ok(bytes) => Outcome::Done { bytes },
        Err(error) => failed(error),
    });
    core.set_quiesced();
    shared.completions.push(id);
}
