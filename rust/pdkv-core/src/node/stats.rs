//! Counters of one node: each event counted once, where it is decided.

/// What a node has seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeStats {
    /// Messages for a claim, transfer or question that has ended or never was.
    pub stray_messages: u64,
    /// Messages of a kind that this release doesn't know.
    pub unknown_messages: u64,
    /// Messages that came in over a channel that is down.
    pub messages_after_down: u64,
    /// Claims that came a second time.
    pub duplicate_claims: u64,
    /// Claims that came before their export and waited for it.
    pub claims_parked: u64,
    /// Claims granted.
    pub claims_granted: u64,
    /// Claims refused.
    pub claims_refused: u64,
    /// Fences answered with `Ack`.
    pub fences_valid: u64,
    /// Fences answered with `Nack`.
    pub fences_refused: u64,
    /// Claims taken back before their end.
    pub claims_revoked: u64,
    /// Claims that the initiator gave back.
    pub claims_abandoned: u64,
    /// Exports whose lease ended before any claim.
    pub expired_unclaimed: u64,
    /// Consumers that declined.
    pub rejects: u64,
    /// Peers dropped because they fell silent.
    pub peers_silent: u64,
    /// Transfers begun.
    pub transfers_begun: u64,
    /// Transfers that ended valid.
    pub transfers_done: u64,
    /// Transfers that failed.
    pub transfers_failed: u64,
    /// Transfers that were cancelled.
    pub transfers_cancelled: u64,
    /// Reports of movers for transfers that have ended or never were.
    pub stray_moves: u64,
    /// Fences asked again after silence.
    pub fences_reasked: u64,
}
