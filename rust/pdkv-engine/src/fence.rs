//! Claims and fences of caches whose memory an allocator may replace. Only the driver knows, and it may be slow, so it is asked on a thread
//! that nobody else waits for: beside a claim, which is taken back if need be, and before a fence is answered.

use std::sync::Arc;

use pdkv_core::id::{CacheId, PeerKey, TransferId};
use pdkv_core::wire::{Claim, Done, Message};
use pdkv_core::{Error, ErrorKind, Result};

use crate::registry::LocalCache;
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
        && cache.movable.look()
    {
        let (again, same) = (Arc::clone(shared), Arc::clone(&cache));
        // Without a thread for it, and for claims that come meanwhile, the fence will tell.
        if shared.movers.task(move || look(&again, peer, transfer, &same)).is_err() {
            cache.movable.looked();
        }
    }
    Ok(known)
}

fn look(shared: &Arc<Shared>, peer: PeerKey, transfer: TransferId, cache: &LocalCache) {
    let found = cache.still_there();
    cache.movable.looked();
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

/// Has a fence answered once the driver has been asked. It is the last that its initiator says of the transfer, so nothing overtakes it that
/// would matter.
pub(crate) fn done(shared: &Arc<Shared>, peer: PeerKey, done: Done) {
    let (again, same) = (Arc::clone(shared), done.clone());
    if shared.movers.task(move || answer(&again, peer, same)).is_err() {
        answer(shared, peer, done);
    }
}

fn answer(shared: &Arc<Shared>, peer: PeerKey, done: Done) {
    let moved = fenced(shared, peer, done.transfer).and_then(|cache| cache.still_there().err());
    let told = shared.drive(|state, now| {
        if let Some(error) = moved {
            state.node.spoil(peer, done.transfer, &error);
        }
        state.node.handle(now, peer, Message::Done(done))
    });
    if let Err(error) = told {
        shared.peer_lost(peer, &error);
    }
}
