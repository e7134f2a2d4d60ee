//! Counters of one engine, for people and for metrics.

use pdkv_core::node::NodeStats;

use crate::shared::Shared;

/// What an engine has done and holds.
#[derive(Clone, Copy, Debug)]
pub struct EngineStats {
    /// Connected peers.
    pub peers: usize,
    /// Exports and offers whose blocks are pinned.
    pub live_exports: usize,
    /// Claims that peers hold on our exports.
    pub live_claims: usize,
    /// Claims that wait for an export that was promised and isn't made yet.
    pub parked_claims: usize,
    /// Transfers of ours that are not quiesced.
    pub live_transfers: usize,
    /// Notifications dropped because nobody asked for them.
    pub notifications_dropped: u64,
    /// What the protocol counted.
    pub protocol: NodeStats,
}

impl EngineStats {
    pub(crate) fn of(shared: &Shared) -> Self {
        let dropped = shared.inbox.dropped();
        let state = shared.lock();
        Self {
            peers: state.peers.len(),
            live_exports: state.node.live_exports(),
            live_claims: state.node.live_claims(),
            parked_claims: state.node.parked_claims(),
            live_transfers: state.node.live_transfers(),
            notifications_dropped: dropped,
            protocol: state.node.stats(),
        }
    }
}
