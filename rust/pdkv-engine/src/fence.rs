//! Claims and fences of caches whose memory an allocator may replace. Only the driver knows, and it may be slow, so it is asked on a thread
//! that nobody else waits for: beside a claim, which is taken back if need be, and before a fence is answered.

use std::sync::{Arc, Mutex, MutexGuard};

use pdkv_core::id::{CacheId, PeerKey, TransferId};
use pdkv_core::wire::{Claim, Done, Message};
use pdkv_core::{Error, ErrorKind, Result};

use crate::mover::contained;
use crate::registry::{LocalCache, Looking};
use crate::shared::Shared;

/// A cache of ours that may move.
fn movable(shared: &Shared, cache: CacheId) -> Option<Arc<LocalCache>> {
    let cache = shared.registry.cache(cache).ok()?;
    cache.movable.may_move().then_some(cache)
}

/// Hands a claim to the node. `false` when the peer was closed meanwhile.
///
/// # Errors
/// As the node's.
pub(crate) fn claim(shared: &Arc<Shared>, peer: PeerKey, claim: Claim) -> Result<bool> {
    let cache = movable(shared, claim.reference.cache);
    let moved = cache.as_ref().and_then(|cache| cache.movable.moved());
    let transfer = claim.transfer;
    let (known, granted) = shared.drive(|state, now| {
        if !state.peers.contains_key(&peer) {
            return Ok::<_, Error>((false, false));
        }
        match moved {
            Some(error) => state.node.refuse_claim(now, peer, claim, error)?,
            None => state.node.handle(now, peer, Message::Claim(Box::new(claim)))?,
        }
        Ok((true, state.node.claim_view(peer, transfer).is_some()))
    })?;
    if granted
        && let Some(cache) = cache
        && let Some(looking) = Looking::begin(&cache)
    {
        let again = Arc::clone(shared);
        // Without a thread for it, and for claims that come meanwhile, the fence will tell.
        let _ = shared.movers.task(move || look(&again, peer, transfer, looking));
    }
    Ok(known)
}

fn look(shared: &Arc<Shared>, peer: PeerKey, transfer: TransferId, looking: Looking) {
    let found = looking.cache().still_there();
    drop(looking);
    if let Err(error) = found
        && error.kind() == ErrorKind::Region
    {
        shared.drive(|state, now| state.node.take_back(now, peer, transfer, &error));
    }
}

/// The cache that a fence is about, if it may have moved.
fn fenced(shared: &Shared, peer: PeerKey, transfer: TransferId) -> Option<Arc<LocalCache>> {
    let cache = shared.lock().node.claim_view(peer, transfer)?.cache;
    movable(shared, cache)
}

/// Whether the driver has to be asked before this fence is answered.
pub(crate) fn is_slow(shared: &Shared, peer: PeerKey, done: &Done) -> bool {
    fenced(shared, peer, done.transfer).is_some()
}

/// Fences of one cache that wait for the driver's word. One thread asks for all of them, however many come and however often each is repeated.
#[derive(Default)]
pub(crate) struct Fences(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// Some thread asks, or is about to.
    asked: bool,
    /// To be answered after the next look.
    next: Vec<(PeerKey, Done)>,
    /// To be answered after the look that is under way.
    now: Vec<(PeerKey, Done)>,
}

impl Fences {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().expect("no holder panics")
    }

    /// Enters a fence, unless it is here already. Whether the caller is to see that the driver is asked.
    fn enter(&self, peer: PeerKey, done: Done) -> bool {
        let mut waiting = self.waiting();
        let known = |(of, known): &(PeerKey, Done)| *of == peer && known.transfer == done.transfer;
        if !waiting.next.iter().chain(&waiting.now).any(known) {
            waiting.next.push((peer, done));
        }
        !std::mem::replace(&mut waiting.asked, true)
    }

    /// What the next look is for, once that for those before is over. `None` when there is nothing: then whoever enters the next one has somebody ask.
    fn next(&self) -> Option<Vec<(PeerKey, Done)>> {
        let mut waiting = self.waiting();
        waiting.now = std::mem::take(&mut waiting.next);
        waiting.asked = !waiting.now.is_empty();
        waiting.asked.then(|| waiting.now.clone())
    }
}

/// Has a fence answered once the driver has been asked. It is the last that its initiator says of the transfer, so nothing overtakes it that
/// would matter.
pub(crate) fn done(shared: &Arc<Shared>, peer: PeerKey, done: Done) {
    let Some(cache) = fenced(shared, peer, done.transfer) else {
        return answer(shared, peer, done, None);
    };
    if !cache.movable.fences.enter(peer, done) {
        return;
    }
    let (again, same) = (Arc::clone(shared), Arc::clone(&cache));
    let ask = move || answer_all(&again, &same, || same.still_there().err());
    if let Err(error) = shared.movers.task(ask) {
        // Every peer would wait for a driver that this thread waits for, and what was not looked at is not confirmed.
        let text = "the owner has no thread on which to ask its driver whether the memory is the one that was claimed";
        let refusal = Error::new(error.kind(), "fence", text).with_hint("it may go well another time");
        answer_all(shared, &cache, || Some(refusal.clone()));
    }
}

fn answer_all(shared: &Arc<Shared>, cache: &LocalCache, look: impl Fn() -> Option<Error>) {
    while let Some(fences) = cache.movable.fences.next() {
        // After a panic it is gone on with those that come: what was not looked at is not confirmed.
        let fault = contained(&look).unwrap_or_else(Some);
        let _ = contained(|| {
            for (peer, done) in fences {
                answer(shared, peer, done, fault.clone());
            }
        });
    }
}

/// Answers a fence, which fails for `fault`.
fn answer(shared: &Arc<Shared>, peer: PeerKey, done: Done, fault: Option<Error>) {
    let told = shared.drive(|state, now| {
        if let Some(error) = fault {
            state.node.spoil(peer, done.transfer, &error);
        }
        state.node.handle(now, peer, Message::Done(done))
    });
    if let Err(error) = told {
        shared.peer_lost(peer, &error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_waits_once_however_often_it_is_repeated_and_one_thread_asks_for_all() {
        let fences = Fences::default();
        let done = |transfer| Done {
            transfer: TransferId(transfer),
            bytes: 0,
        };
        assert!(fences.enter(PeerKey(1), done(7)));
        assert!(!fences.enter(PeerKey(1), done(7)));
        assert!(!fences.enter(PeerKey(2), done(7)));
        assert_eq!(fences.next().unwrap(), [(PeerKey(1), done(7)), (PeerKey(2), done(7))]);
        // The driver is being asked.
        assert!(!fences.enter(PeerKey(1), done(7)));
        assert!(!fences.enter(PeerKey(1), done(8)));
        assert_eq!(fences.next().unwrap(), [(PeerKey(1), done(8))]);
        assert!(fences.next().is_none());
        assert!(fences.enter(PeerKey(1), done(8)), "nobody asks any more");
    }
}
