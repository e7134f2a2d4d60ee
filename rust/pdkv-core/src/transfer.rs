//! One transfer as its initiator sees it: a total table from (state, event) to effects.
//!
//! The table keeps three promises. A transfer finishes exactly once. Nothing is reported valid
//! before the owner's fence. Memory counts as quiesced only when the mover has said that it is out
//! of it, however the transfer ended. Who sends the effects, and when time is up, is `node`'s.

use core::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::plan::{Selection, WireOrder};
use crate::reference::Reference;

/// What a caller wants moved.
#[derive(Clone, Debug)]
pub struct TransferSpec {
    /// The export or offer.
    pub reference: Reference,
    /// Digest the caller computed from its own prompt; `None` states nothing.
    pub expected_digest: Option<Vec<u8>>,
    /// Fingerprint of the caller's own cache.
    pub expected_fingerprint: [u8; 32],
    /// First block, as position in the export.
    pub first_block: u32,
    /// Number of blocks; zero is legal.
    pub num_blocks: u32,
    /// Which layers.
    pub selection: Selection,
    /// Name of the transport that will move the bytes.
    pub transport: String,
    /// Time the whole transfer may take.
    pub timeout: Duration,
    /// Whether the grant must carry the owner's block table.
    pub wants_table: bool,
    /// Byte order of a two-sided stream.
    pub order: Option<WireOrder>,
}

/// Where a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferState {
    /// The claim is sent.
    Claiming,
    /// The mover runs.
    Moving,
    /// Every byte is placed; the owner's fence is awaited.
    Fencing,
    /// Finished without success; the mover has not let go yet.
    Stopping,
    /// Finished and quiesced.
    Ended,
}

/// What the destination holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Nothing was written.
    Untouched,
    /// Something may have been written; the bytes must not be used.
    Invalid,
    /// The bytes are those that the reference named.
    Valid,
}

impl Destination {
    /// The lowercase name shown to users.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Untouched => "untouched",
            Self::Invalid => "invalid",
            Self::Valid => "valid",
        }
    }
}

/// How a transfer ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Valid, by the owner's word.
    Done {
        /// Bytes moved.
        bytes: u64,
    },
    /// Not.
    Failed {
        /// Why.
        error: Error,
        /// What the destination holds.
        destination: Destination,
    },
    /// The caller cancelled it.
    Cancelled {
        /// What the destination holds.
        destination: Destination,
    },
}

impl Outcome {
    /// What the destination holds.
    pub fn destination(&self) -> Destination {
        match self {
            Self::Done { .. } => Destination::Valid,
            Self::Failed { destination, .. } | Self::Cancelled { destination } => *destination,
        }
    }
}

/// What happens to a transfer.
#[derive(Debug)]
pub(crate) enum Event {
    Granted,
    Refused(Error),
    MoveEnded(Result<u64, Error>),
    Acked,
    Nacked(Error),
    Revoked(Error),
    Cancelled,
    TimedOut(Error),
    PeerLost(Error),
}

/// What must be done about it, in order.
#[derive(Debug)]
pub(crate) enum Effect {
    StartMove,
    StopMove,
    SendDone(u64),
    SendAbandon(ErrorKind),
    Finish(Outcome),
    Quiesce,
}

/// The state machine. Fencing keeps the byte count for the final report.
#[derive(Debug)]
pub(crate) struct Machine {
    state: TransferState,
    bytes: u64,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self {
            state: TransferState::Claiming,
            bytes: 0,
        }
    }

    pub(crate) fn state(&self) -> TransferState {
        self.state
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Applies `event`; `None` means that it is a stray one and changed nothing.
    pub(crate) fn on(&mut self, event: Event) -> Option<Vec<Effect>> {
        use TransferState::{Claiming, Ended, Fencing, Moving, Stopping};
        let (next, effects) = match (self.state, event) {
            (Claiming, Event::Granted) => (Moving, vec![Effect::StartMove]),
            (Claiming, Event::Refused(error) | Event::PeerLost(error)) => {
                (Ended, vec![failed(error, Destination::Untouched), Effect::Quiesce])
            }
            (Claiming, event @ (Event::Cancelled | Event::TimedOut(_) | Event::Revoked(_))) => {
                let (reason, finish) = given_up(event, Destination::Untouched);
                (Ended, vec![Effect::SendAbandon(reason), finish, Effect::Quiesce])
            }
            (Moving, Event::MoveEnded(Ok(bytes))) => {
                self.bytes = bytes;
                (Fencing, vec![Effect::SendDone(bytes)])
            }
            (Moving, Event::MoveEnded(Err(error))) => {
                let reason = error.kind();
                let finish = failed(error, Destination::Invalid);
                (Ended, vec![Effect::SendAbandon(reason), finish, Effect::Quiesce])
            }
            (Moving, event @ (Event::Cancelled | Event::TimedOut(_) | Event::Revoked(_) | Event::PeerLost(_))) => {
                let (_, finish) = given_up(event, Destination::Invalid);
                (Stopping, vec![Effect::StopMove, finish])
            }
            (Stopping, Event::MoveEnded(_)) => (
                Ended,
                vec![Effect::SendAbandon(ErrorKind::TransferCancelled), Effect::Quiesce],
            ),
            (Fencing, Event::Acked) => (
                Ended,
                vec![Effect::Finish(Outcome::Done { bytes: self.bytes }), Effect::Quiesce],
            ),
            (Fencing, Event::Nacked(error) | Event::PeerLost(error)) => {
                (Ended, vec![failed(error, Destination::Invalid), Effect::Quiesce])
            }
            (Fencing, event @ (Event::Cancelled | Event::TimedOut(_) | Event::Revoked(_))) => {
                let (reason, finish) = given_up(event, Destination::Invalid);
                (Ended, vec![Effect::SendAbandon(reason), finish, Effect::Quiesce])
            }
            _ => return None,
        };
        self.state = next;
        Some(effects)
    }
}

fn failed(error: Error, destination: Destination) -> Effect {
    Effect::Finish(Outcome::Failed { error, destination })
}

/// The reason for the owner and the outcome for the caller of an end that the owner did not cause.
fn given_up(event: Event, destination: Destination) -> (ErrorKind, Effect) {
    match event {
        Event::TimedOut(error) | Event::Revoked(error) | Event::PeerLost(error) => {
            (error.kind(), failed(error, destination))
        }
        _ => (
            ErrorKind::TransferCancelled,
            Effect::Finish(Outcome::Cancelled { destination }),
        ),
    }
}
