//! The control messages as the rest of the crate sees them: typed ids, durations, checked values.
//!
//! Nothing here knows how a message looks on the wire (`schema`, `convert`) or who may send it when
//! (`node`). A message that came out of the decoder has passed every check that needs no state.

use core::time::Duration;

use super::hello::{CacheAdvert, HandshakeRefusal, Hello, HelloAck, RegionAdvert, StreamHello};
use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind};
use crate::id::{CacheId, RegionId, TransferId};
use crate::plan::WireOrder;
use crate::reference::Reference;

/// One frame of the control channel.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// First frame of the connecting side.
    Hello(Box<Hello>),
    /// Answer of the accepting side.
    HelloAck(Box<HelloAck>),
    /// The accepting side won't talk; it closes afterwards.
    HandshakeRefusal(HandshakeRefusal),
    /// First frame of a data stream; never on a control channel.
    StreamHello(StreamHello),
    /// Regions and caches that were registered after the hello.
    Advertise(Advertise),
    /// Regions and caches that are gone.
    Withdraw(Withdraw),
    /// The initiator wants (part of) an export.
    Claim(Box<Claim>),
    /// The owner pinned it for this claim.
    Grant(Grant),
    /// The owner won't; the destination is untouched.
    Refuse(Refuse),
    /// The initiator placed every byte: is it valid?
    Done(Done),
    /// The owner's fence: the bytes are the ones the reference named.
    Ack(Ack),
    /// The owner's fence: they are not, or can't be relied on.
    Nack(Nack),
    /// The initiator gives the claim back and touches its memory no more.
    Abandon(Abandon),
    /// The owner takes the claim back; the initiator stops and answers with `Abandon`.
    Revoke(Revoke),
    /// The initiator asks for a longer lease.
    Renew(Box<Renew>),
    /// The owner's answer to `Renew`.
    Renewed(Renewed),
    /// The initiator won't claim; frees the consumer's slot.
    Reject(Box<Reject>),
    /// The initiator asks how its claim stands, after silence.
    Status(Status),
    /// The owner's answer to `Status`.
    StatusReply(StatusReply),
    /// Small bytes for the application.
    Notify(Notify),
    /// Liveness probe.
    Ping(Ping),
    /// Answer to `Ping` with the same number.
    Pong(Pong),
    /// The sender closes in order.
    Goodbye(Goodbye),
    /// A kind that this release doesn't know.
    Unknown(Unknown),
}

impl Message {
    /// The name of the kind, for messages and counters.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::HelloAck(_) => "hello_ack",
            Self::HandshakeRefusal(_) => "handshake_refusal",
            Self::StreamHello(_) => "stream_hello",
            Self::Advertise(_) => "advertise",
            Self::Withdraw(_) => "withdraw",
            Self::Claim(_) => "claim",
            Self::Grant(_) => "grant",
            Self::Refuse(_) => "refuse",
            Self::Done(_) => "done",
            Self::Ack(_) => "ack",
            Self::Nack(_) => "nack",
            Self::Abandon(_) => "abandon",
            Self::Revoke(_) => "revoke",
            Self::Renew(_) => "renew",
            Self::Renewed(_) => "renewed",
            Self::Reject(_) => "reject",
            Self::Status(_) => "status",
            Self::StatusReply(_) => "status_reply",
            Self::Notify(_) => "notify",
            Self::Ping(_) => "ping",
            Self::Pong(_) => "pong",
            Self::Goodbye(_) => "goodbye",
            Self::Unknown(_) => "unknown",
        }
    }
}

/// Newly registered memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Advertise {
    /// New regions.
    pub regions: Vec<RegionAdvert>,
    /// New caches; their regions are in this or an earlier advert.
    pub caches: Vec<CacheAdvert>,
}

/// Memory that is no longer registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Withdraw {
    /// Regions to unmap and forget.
    pub regions: Vec<RegionId>,
    /// Caches to forget.
    pub caches: Vec<CacheId>,
}

/// What a consumer (or a writer, for an offer) asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The initiator's name for the transfer; grows within one session.
    pub transfer: TransferId,
    /// The capability, every field of it.
    pub reference: Reference,
    /// Digest that the claimant computed from its own prompt, if it did.
    pub expected_digest: Option<Vec<u8>>,
    /// Fingerprint of the claimant's own cache.
    pub expected_fingerprint: [u8; 32],
    /// First block, as position in the export.
    pub first_block: u32,
    /// Blocks wanted; zero is legal and still ends the lease.
    pub num_blocks: u32,
    /// First layer wanted.
    pub first_layer: u32,
    /// Layers wanted.
    pub num_layers: u32,
    /// Name of the transport the initiator will use.
    pub transport: String,
    /// Time the initiator gives the transfer, from now.
    pub remaining: Duration,
    /// Whether the grant must carry the block table (one-sided transports).
    pub wants_table: bool,
    /// Byte order of two-sided streams.
    pub order: Option<WireOrder>,
}

/// The claim is pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Which claim.
    pub transfer: TransferId,
    /// Cache of the owner that holds the blocks.
    pub cache: CacheId,
    /// Blocks granted.
    pub num_blocks: u32,
    /// The owner's physical blocks, when the claim asked for them.
    pub blocks: Option<BlockTable>,
    /// Time until the owner takes the claim back, measured when the grant was made.
    pub remaining: Duration,
}

/// Kind, text and hint of an error that crosses the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What went wrong, as seen by the sender.
    pub kind: ErrorKind,
    /// The cause, one line.
    pub message: String,
    /// What the user can do, or empty.
    pub hint: String,
}

impl Fault {
    /// Takes what may cross the wire of an error.
    pub fn of(error: &Error) -> Self {
        Self {
            kind: error.kind(),
            message: error.message().to_owned(),
            hint: error.hint().unwrap_or_default().to_owned(),
        }
    }

    /// The error on the receiving side.
    pub fn into_error(self, operation: &'static str) -> Error {
        let error = Error::new(self.kind, operation, self.message);
        if self.hint.is_empty() {
            error
        } else {
            error.with_hint(self.hint)
        }
    }
}

macro_rules! about_transfer {
    ($( $(#[doc = $doc:literal])+ $name:ident { $( $(#[doc = $field_doc:literal])+ $field:ident: $ty:ty ),* $(,)? } )+) => { $(
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name {
            /// Which transfer, in the initiator's numbering.
            pub transfer: TransferId,
            $( $(#[doc = $field_doc])+ pub $field: $ty, )*
        }
    )+ };
}

about_transfer! {
    /// The claim is refused and nothing was pinned.
    Refuse {
        /// Why.
        fault: Fault,
    }
    /// Every byte is placed.
    Done {
        /// Bytes moved.
        bytes: u64,
    }
    /// The bytes are valid.
    Ack {}
    /// The bytes must not be used.
    Nack {
        /// Why.
        fault: Fault,
    }
    /// The initiator is out of the memory.
    Abandon {
        /// Why it gave up.
        reason: ErrorKind,
    }
    /// The owner takes the claim back.
    Revoke {
        /// Why.
        fault: Fault,
    }
    /// How does it stand?
    Status {}
    /// So it stands.
    StatusReply {
        /// The owner's view.
        status: ClaimStatus,
    }
}

/// What the owner knows about a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimStatus {
    /// Never seen, or forgotten long ago.
    Unknown,
    /// Granted, no `Done` seen.
    Active,
    /// `Done` seen and the bytes were valid.
    Completed,
    /// Ended without success.
    Failed(Fault),
}

/// A longer lease, please.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renew {
    /// Number of the question, echoed in the answer.
    pub request: u64,
    /// Which export.
    pub reference: Reference,
    /// Lease wanted from now on.
    pub extend: Duration,
}

/// Answer to [`Renew`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renewed {
    /// Number of the question.
    pub request: u64,
    /// Lease that remains, or why it was not extended.
    pub result: Result<Duration, Fault>,
}

/// The consumer won't come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// Which export.
    pub reference: Reference,
    /// Tells consumers in one engine apart; the same number again changes nothing.
    pub consumer: u64,
}

/// Application bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notify {
    /// At most [`MAX_NOTIFY`](super::MAX_NOTIFY) bytes.
    pub bytes: Vec<u8>,
}

/// Are you there?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ping {
    /// Number, echoed.
    pub sequence: u64,
}

/// I am.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pong {
    /// Number of the ping.
    pub sequence: u64,
}

/// Orderly close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Goodbye {
    /// Why, for the log of the other side.
    pub reason: String,
}

/// A kind of a later release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// The sender says that ignoring it is not safe.
    pub critical: bool,
}
