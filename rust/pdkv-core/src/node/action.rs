//! What a node asks its engine to do. The engine takes actions in order and does all the I/O.

use core::time::Duration;

use crate::error::{Error, Result};
use crate::export::ExportState;
use crate::id::{ExportId, PeerKey, TransferId};
use crate::transfer::Outcome;
use crate::wire::{Advertise, Grant, Message, Withdraw};

/// One thing to do.
#[derive(Debug)]
pub enum Action {
    /// Put a message on the peer's control channel, in order.
    Send {
        /// Whose channel.
        peer: PeerKey,
        /// What.
        message: Message,
    },
    /// Start the mover; it answers once with [`Node::moved`](super::Node::moved).
    Move {
        /// Which transfer.
        transfer: TransferId,
        /// The owner of the export.
        peer: PeerKey,
        /// What was granted.
        grant: Grant,
    },
    /// Stop the mover as soon as it can; it still answers with [`Node::moved`](super::Node::moved).
    Stop {
        /// Which transfer.
        transfer: TransferId,
    },
    /// The transfer has its outcome. Comes exactly once, perhaps while the mover still runs.
    Finished {
        /// Which transfer.
        transfer: TransferId,
        /// How it ended.
        outcome: Outcome,
    },
    /// Nobody touches the transfer's memory any more. Comes exactly once, after `Finished`.
    Quiesced {
        /// Which transfer.
        transfer: TransferId,
    },
    /// An export or offer of ours changed its state.
    ExportChanged {
        /// Which.
        export: ExportId,
        /// The new state.
        state: ExportState,
    },
    /// The peer sent application bytes.
    Notified {
        /// Over which channel.
        peer: PeerKey,
        /// Name of the sender.
        name: String,
        /// What it sent.
        bytes: Vec<u8>,
    },
    /// The peer registered memory.
    Advertised {
        /// Who.
        peer: PeerKey,
        /// What.
        advertise: Advertise,
    },
    /// The peer deregistered memory: unmap it.
    Withdrawn {
        /// Who.
        peer: PeerKey,
        /// What.
        withdraw: Withdraw,
    },
    /// Answer to [`Node::renew_remote`](super::Node::renew_remote).
    Renewed {
        /// Whom we asked.
        peer: PeerKey,
        /// Number of the question.
        request: u64,
        /// Lease that remains, or the refusal.
        result: Result<Duration>,
    },
    /// Drop the channel. The node has forgotten the peer already.
    Close {
        /// Which channel.
        peer: PeerKey,
        /// Why.
        error: Error,
    },
    /// Data streams that serve this claim must stop touching memory.
    ServeStop {
        /// Whose claim.
        peer: PeerKey,
        /// Which.
        transfer: TransferId,
    },
}
