//! What this process sees of a peer's shared memory: one mapping for each region, made by whoever first wants it. What fails
//! for a reason that may pass is tried again after a while, by nobody who would have to wait for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;

use crate::door::LocalDoor;
use crate::lists::Regions;
use crate::mover::Movers;
use crate::remote::RemoteRegion;
use crate::view::lasts;

/// How long somebody who waits takes to see that its transfer is to stop.
const SLICE: Duration = Duration::from_millis(20);
/// When to try again what failed.
const AGAIN: Duration = Duration::from_secs(2);

/// A stretch of a remote region that is visible in this process.
#[derive(Clone)]
pub(crate) struct Mapped {
    pub(crate) memory: Memory,
    /// Where in the remote region the mapping starts.
    pub(crate) region_offset: u64,
}

impl Mapped {
    /// The offset in `memory` of a range of the region, when the range lies wholly inside.
    pub(crate) fn locate(&self, offset: u64, len: u64) -> Option<u64> {
        let start = offset.checked_sub(self.region_offset)?;
        (start.checked_add(len)? <= self.memory.len()).then_some(start)
    }
}

enum State {
    /// The region has no shared part, or this peer's memory can't be mapped here.
    Impossible(String),
    /// Nobody has tried.
    Open,
    /// Being made; for the second time, if it failed before.
    Pending(Option<Error>),
    /// It failed, and may be tried again from then on.
    Failed(Error, Instant),
    Ready(Mapped),
}

impl State {
    fn is_final(&self) -> bool {
        matches!(self, Self::Ready(_) | Self::Impossible(_))
    }
}

/// The mapping of one region.
pub(crate) struct Mapping {
    state: Mutex<State>,
    settled: Condvar,
    /// Whether there is a mapping, or there never will be one: no transfer has to try again. Does not change back.
    is_final: AtomicBool,
}

impl Mapping {
    fn new(state: State) -> Self {
        Self {
            is_final: AtomicBool::new(state.is_final()),
            state: Mutex::new(state),
            settled: Condvar::new(),
        }
    }

    /// To be made by whoever wants it first.
    pub(crate) fn open() -> Self {
        Self::new(State::Open)
    }

    pub(crate) fn impossible(reason: &str) -> Self {
        Self::new(State::Impossible(reason.to_owned()))
    }

    pub(crate) fn ready(mapped: Mapped) -> Self {
        Self::new(State::Ready(mapped))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Whether the caller is to make it and then to settle it: nobody has tried, and nobody is about to.
    pub(crate) fn claim(&self) -> bool {
        let mut state = self.state();
        let open = matches!(*state, State::Open);
        if open {
            *state = State::Pending(None);
        }
        open
    }

    /// The same for one that failed a while ago.
    fn claim_again(&self, now: Instant) -> bool {
        if self.is_final() {
            return false;
        }
        let mut state = self.state();
        match &*state {
            State::Failed(error, again) if *again <= now => {
                *state = State::Pending(Some(error.clone()));
                true
            }
            _ => false,
        }
    }

    /// Says what became of a claimed one; what was said before stands.
    pub(crate) fn settle(&self, outcome: Result<Mapped>, now: Instant) {
        let mut state = self.state();
        if let State::Pending(before) = &*state {
            *state = match (outcome, before) {
                (Ok(mapped), _) => State::Ready(mapped),
                (Err(error), _) if lasts(&error) => State::Impossible(error.message().to_owned()),
                // It was not tried to the end.
                (Err(error), None) if error.kind() == ErrorKind::TransferCancelled => State::Open,
                (Err(error), Some(before)) if error.kind() == ErrorKind::TransferCancelled => {
                    State::Failed(before.clone(), now)
                }
                (Err(error), _) => State::Failed(error, now + AGAIN),
            };
            self.is_final.store(state.is_final(), Ordering::Release);
        }
        drop(state);
        self.settled.notify_all();
    }

    /// Whether there is one, or one is to be expected; the reason when not.
    pub(crate) fn expected(&self) -> Result<(), String> {
        match &*self.state() {
            State::Impossible(reason) => Err(reason.clone()),
            State::Failed(error, _) | State::Pending(Some(error)) => Err(error.message().to_owned()),
            State::Open | State::Pending(None) | State::Ready(_) => Ok(()),
        }
    }

    /// Whether there is one, or there never will be.
    pub(crate) fn is_final(&self) -> bool {
        self.is_final.load(Ordering::Acquire)
    }

    /// Whether there is none and never will be.
    pub(crate) fn is_impossible(&self) -> bool {
        matches!(*self.state(), State::Impossible(_))
    }

    /// The mapping, without waiting.
    pub(crate) fn now(&self) -> Option<Mapped> {
        match &*self.state() {
            State::Ready(mapped) => Some(mapped.clone()),
            _ => None,
        }
    }

    /// The mapping; waits while it is being made, as long as the caller isn't told to stop. `None` when nobody makes it.
    fn wait(&self, stopped: &dyn Fn() -> bool) -> Result<Option<Mapped>> {
        let mut state = self.state();
        loop {
            match &*state {
                State::Ready(mapped) => return Ok(Some(mapped.clone())),
                State::Impossible(reason) => return Err(Error::new(ErrorKind::Region, "shm", reason.clone())),
                State::Failed(error, _) => return Err(error.clone()),
                State::Open | State::Pending(_) if stopped() => {
                    return Err(Error::new(ErrorKind::TransferCancelled, "shm", "stopped while mapping"));
                }
                State::Open => return Ok(None),
                State::Pending(_) => state = self.settled.wait_timeout(state, SLICE).expect("no holder panics").0,
            }
        }
    }
}

impl RemoteRegion {
    /// The mapping; made here if nobody has tried, waited for while somebody else makes it, as long as the caller isn't told to
    /// stop.
    ///
    /// # Errors
    /// `Region` when there can be none, `TransferCancelled`, and what kept it from being made now.
    pub(crate) fn mapped(self: &Arc<Self>, door: Option<&LocalDoor>, stopped: &dyn Fn() -> bool) -> Result<Mapped> {
        let explain = |error: Error| match error.kind() {
            ErrorKind::TransferCancelled => error,
            kind => {
                let text = format!("region `{}` of the peer can't be mapped: {}", self.id, error.message());
                Error::new(kind, "shm", text)
            }
        };
        loop {
            match self.mapping.wait(stopped).map_err(explain)? {
                Some(mapped) => return Ok(mapped),
                None => map_open(door, std::slice::from_ref(self), stopped),
            }
        }
    }
}

/// Maps, with one question, those of the regions for which nobody has tried yet. Blocks on the peer.
pub(crate) fn map_open(door: Option<&LocalDoor>, regions: &[Arc<RemoteRegion>], stopped: &dyn Fn() -> bool) {
    let claimed = regions.iter().filter(|region| region.mapping.claim());
    make(door, &Claimed(claimed.cloned().collect()), stopped);
}

/// Regions that somebody is to map and to settle, each of them. Whoever panics before that leaves them to the next one; what was settled stands.
struct Claimed(Vec<Arc<RemoteRegion>>);

impl Claimed {
    fn settle_rest(&self, error: &Error) {
        for region in &self.0 {
            region.mapping.settle(Err(error.clone()), Instant::now());
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.settle_rest(&Error::new(ErrorKind::TransferCancelled, "shm", "not tried to the end"));
    }
}

/// Has those of the regions tried again for which that failed a while ago. Waits for nobody.
pub(crate) fn map_again(door: &LocalDoor, movers: &Movers, regions: &Regions) {
    if regions.are_mapped() {
        return;
    }
    let now = Instant::now();
    let failed = regions.iter().filter(|region| region.mapping.claim_again(now));
    let claimed = Arc::new(Claimed(failed.cloned().collect()));
    if claimed.0.is_empty() {
        return;
    }
    let (door, mine) = (door.clone(), Arc::clone(&claimed));
    if let Err(error) = movers.task(move || make(Some(&door), &mine, &|| false)) {
        claimed.settle_rest(&error);
    }
}

/// Makes the mappings that were claimed, and settles each.
fn make(door: Option<&LocalDoor>, claimed: &Claimed, stopped: &dyn Fn() -> bool) {
    if claimed.0.is_empty() {
        return;
    }
    let missing = |text: &str| Error::new(ErrorKind::Unsupported, "shm", text);
    let wanted: Vec<_> = claimed.0.iter().map(|region| (region.id, region.len)).collect();
    let by_id: BTreeMap<RegionId, _> = claimed.0.iter().map(|region| (region.id, region)).collect();
    let asked = match door {
        Some(door) => door.map(&wanted, stopped, |id, outcome| {
            if let Some(region) = by_id.get(&id) {
                region.mapping.settle(outcome, Instant::now());
            }
        }),
        None => Err(missing("the peer's local socket can't be reached")),
    };
    let rest = asked
        .err()
        .unwrap_or_else(|| missing("the peer handed out no descriptor"));
    claimed.settle_rest(&rest);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, "test", "as the test wants")
    }

    #[test]
    fn only_what_lasts_is_impossible_for_good() {
        let start = Instant::now();
        for kind in [ErrorKind::Unsupported, ErrorKind::Region] {
            let mapping = Mapping::open();
            assert!(mapping.claim() && !mapping.claim());
            mapping.settle(Err(error(kind)), start);
            assert!(mapping.is_impossible() && mapping.expected().is_err());
            assert!(!mapping.claim() && !mapping.claim_again(start + 100 * AGAIN));
        }
        for kind in [
            ErrorKind::PeerLost,
            ErrorKind::PeerUnreachable,
            ErrorKind::Handshake,
            ErrorKind::Capacity,
        ] {
            let mapping = Mapping::open();
            assert!(mapping.claim());
            mapping.settle(Err(error(kind)), start);
            // Nobody takes this way for now, or waits for it.
            assert!(mapping.expected().is_err() && !mapping.is_impossible());
            assert_eq!(mapping.wait(&|| false).map(drop).unwrap_err().kind(), kind);
            assert!(!mapping.claim() && !mapping.claim_again(start + AGAIN / 2));
            // One tries again, and the others take another way until it is there.
            assert!(mapping.claim_again(start + AGAIN) && !mapping.claim_again(start + AGAIN));
            assert!(mapping.expected().is_err());
            mapping.settle(Err(error(ErrorKind::TransferCancelled)), start);
            assert!(mapping.claim_again(start));
            mapping.settle(Err(error(ErrorKind::Unsupported)), start);
            assert!(mapping.is_impossible());
        }
    }

    #[test]
    fn what_was_not_tried_to_the_end_is_anybodys() {
        let mapping = Mapping::open();
        assert!(mapping.claim());
        let looks = Cell::new(0);
        let stopped = || {
            looks.set(looks.get() + 1);
            looks.get() > 2
        };
        let waited = mapping.wait(&stopped).map(drop).unwrap_err();
        assert_eq!(waited.kind(), ErrorKind::TransferCancelled);
        mapping.settle(Err(error(ErrorKind::TransferCancelled)), Instant::now());
        assert!(mapping.expected().is_ok() && mapping.wait(&|| false).unwrap().is_none());
        assert!(mapping.claim());
    }
}
